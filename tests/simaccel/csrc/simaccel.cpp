// A simulated accelerator for machines without one: torch's PrivateUse1 device, renamed "sim".
//
// Code written for an accelerator runs on it unmodified, and meets what CPU tests hide: memory with its own addresses
// and a limit, work that happens later, in any order that the program allows, and calls that fail. One translation
// unit, read in this order:
//
//   address_space.h  device addresses          runtime.h      what torch asks of a device
//   scheduler.h      streams, events, order    kernels.h      copies and operators
//   memory.h         allocators                collectives.h  gloo on device tensors
//
// It links libtorch_cpu and libc10 only, is loaded with torch.ops.load_library, and is controlled by torch.ops.simaccel.

#include "collectives.h"

namespace simaccel {
namespace {

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuardImpl)
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &PinnedMemory::instance())

const bool registered = [] {
  c10::SetAllocator(kSim, &DeviceMemory::instance());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &simaccel::empty_strided);
  m.impl("resize_", &simaccel::resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &simaccel::record_stream);
}

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_",
        "recv_any_source_", "barrier"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&Collective::run>());
  }
}

// ---- control ----

void set_policy(int64_t policy) {
  auto lock = Scheduler::instance().lock();
  Scheduler::instance().set_policy(static_cast<Policy>(policy));
}
void set_seed(int64_t seed) {
  auto lock = Scheduler::instance().lock();
  Scheduler::instance().set_seed(static_cast<uint64_t>(seed));
}
void set_slow_mask(int64_t mask) {
  auto lock = Scheduler::instance().lock();
  Scheduler::instance().set_slow_mask(static_cast<uint64_t>(mask));
}
void set_slow(int64_t device, int64_t stream_id, bool slow) {
  auto lock = Scheduler::instance().lock();
  Scheduler::instance().set_slow(static_cast<int>(stream_id == 0 ? device : stream_id), slow);
}
void set_capacity(int64_t nbytes) {
  auto lock = Scheduler::instance().lock();
  DeviceMemory::instance().capacity = nbytes;
}
void fail_nth_alloc(int64_t nth) {
  auto lock = Scheduler::instance().lock();
  DeviceMemory::instance().fail_alloc.arm(nth);
}
void fail_nth_pin(int64_t nth) {
  auto lock = Scheduler::instance().lock();
  PinnedMemory::instance().fail_pin.arm(nth);
}
void fail_nth_copy(int64_t nth, bool late) {
  auto lock = Scheduler::instance().lock();
  fail_copy.arm(nth);
  fail_copy.late = late;
}

// Back to the state of a fresh process, but for the memory that tensors still hold.
void reset() {
  auto lock = Scheduler::instance().lock();
  fail_nth_alloc(0);
  fail_nth_pin(0);
  fail_nth_copy(0, false);
  set_capacity(DeviceMemory::kDefaultCapacity);
  Scheduler::instance().reset();
  DeviceMemory::instance().emptyCache({});
  PinnedMemory::instance().empty_cache();
  for (c10::DeviceIndex device = 0; device < kNumDevices; ++device) DeviceMemory::instance().resetPeakStats(device);
  PinnedMemory::instance().reset_peak_stats();
}

// Current and peak.
std::vector<int64_t> pinned_nbytes() {
  const at::HostStats stats = PinnedMemory::instance().get_stats();
  return {stats.active_bytes.current, stats.active_bytes.peak};
}
int64_t num_pending() {
  auto lock = Scheduler::instance().lock();
  return Scheduler::instance().num_pending();
}
double virtual_secs() {
  auto lock = Scheduler::instance().lock();
  return Scheduler::instance().virtual_secs();
}
// The bytes as they are now, without waiting for anything.
Tensor peek(const Tensor& t) {
  auto lock = Scheduler::instance().lock();
  return snapshot(host_view(t));
}
void host_register(const Tensor& t) {
  PinnedMemory::instance().register_range(t.mutable_data_ptr(), t.storage().nbytes());
}
void host_unregister(const Tensor& t) { PinnedMemory::instance().unregister_range(t.mutable_data_ptr()); }

TORCH_LIBRARY(simaccel, m) {
  m.def("num_devices", [] { return int64_t{kNumDevices}; });
  m.def("set_policy", &set_policy);
  m.def("set_seed", &set_seed);
  m.def("set_slow_mask", &set_slow_mask);
  m.def("set_slow", &set_slow);
  m.def("set_capacity", &set_capacity);
  m.def("fail_nth_alloc", &fail_nth_alloc);
  m.def("fail_nth_pin", &fail_nth_pin);
  m.def("fail_nth_copy", &fail_nth_copy);
  m.def("reset", &reset);
  m.def("reset_pinned_peak", [] { PinnedMemory::instance().reset_peak_stats(); });
  m.def("pinned_nbytes", &pinned_nbytes);
  m.def("num_pending", &num_pending);
  m.def("virtual_secs", &virtual_secs);
  m.def("peek", &peek);
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
}

}  // namespace
}  // namespace simaccel
