// Operators. A kernel of the device is the CPU's kernel, run over the same bytes when the scheduler says so.
#pragma once

#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <string_view>

namespace simaccel {

using at::Tensor;
using torch::jit::Stack;

// What runs inside is the device's affair: dispatch modes, autocast and autograd of the thread that happens to run a
// pending kernel must not see it.
class DeviceSide {
 public:
  DeviceSide() : exclude_(hidden()) {}

 private:
  static c10::DispatchKeySet hidden() {
    return c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}) |
           c10::autocast_dispatch_keyset;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

// Elements from the first to the last that the tensor can reach, both included.
inline int64_t reach(const Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) == 0) return 0;
    last += (t.size(d) - 1) * t.stride(d);
  }
  return last + 1;
}

inline int64_t reach_nbytes(const Tensor& t) {
  const int64_t elements = reach(t);
  return elements == 0 ? 0 : (t.storage_offset() + elements) * static_cast<int64_t>(t.itemsize());
}

// Type promotion treats a Python number that became a tensor differently.
inline void keep_wrapped_number(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// A CPU tensor over the bytes of a device (or pinned) tensor. It holds no reference: a launched kernel does not keep
// its operands alive.
inline Tensor host_view(const Tensor& t) {
  const auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  const DeviceSide scope;
  if (reach(t) == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  TORCH_CHECK(static_cast<int64_t>(t.storage().nbytes()) >= reach_nbytes(t),
              "sim: access to released device storage: the tensor needs ", reach_nbytes(t),
              " bytes, its storage has ", t.storage().nbytes());
  void* data = const_cast<void*>(t.const_data_ptr());
  if (t.is_privateuseone()) data = AddressSpace::instance().bytes(data);
  Tensor view = at::from_blob(data, t.sizes(), t.strides(), options);
  view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  keep_wrapped_number(t, view);
  return view;
}

// The value that a host operand has when the kernel is launched.
inline Tensor snapshot(const Tensor& t) {
  const DeviceSide scope;
  Tensor copy = t.clone();
  keep_wrapped_number(t, copy);
  return copy;
}

inline double nbytes(const Tensor& t) { return static_cast<double>(t.numel()) * static_cast<double>(t.itemsize()); }

// ---- copies ----

struct CopyInjection : Injection {
  bool late = false;  // fails when it runs, not when it is launched
};
inline CopyInjection fail_copy;

inline void copy_within(const Tensor& src, const Tensor& dst) {
  const int device = dst.device().index();
  const bool peer = src.device() != dst.device();
  if (peer) Scheduler::instance().synchronize_device(src.device().index());
  Scheduler::instance().submit(current_stream(device), {Engine::kCompute, 2 * nbytes(dst)}, !peer,
                               [from = host_view(src), to = host_view(dst)] {
                                 const DeviceSide scope;
                                 to.copy_(from);
                               });
}

inline void copy_over_link(const Tensor& src, const Tensor& dst, bool non_blocking) {
  auto& pinned = PinnedMemory::instance();
  const bool to_host = src.is_privateuseone();
  const Tensor& host = to_host ? dst : src;
  const int stream = current_stream((to_host ? src : dst).device().index());
  const bool host_pinned = pinned.is_pinned(host.const_data_ptr());
  const bool fail = fail_copy.fires();
  const char* direction = to_host ? "D2H" : "H2D";
  TORCH_CHECK(!fail || fail_copy.late, "sim: ", direction, " copy of ", nbytes(dst), " bytes failed (injected)");
  // Pageable memory, as CUDA treats it: the device waits for nothing that the host may change, so a source is staged
  // before the call returns, and a target is complete when it does.
  const bool staged = non_blocking && !to_host && !host_pinned;
  const bool deferrable = non_blocking && (host_pinned || staged);
  const Tensor from = staged ? snapshot(src) : host_view(src);
  Scheduler::instance().submit(stream, {to_host ? Engine::kD2H : Engine::kH2D, nbytes(dst)}, deferrable,
                               [from, to = host_view(dst), fail, direction] {
                                 TORCH_CHECK(!fail, direction, " copy failed (injected)");
                                 const DeviceSide scope;
                                 to.copy_(from);
                               });
  if (deferrable) {
    pinned.mark_used(host.const_data_ptr(), stream);
  } else {
    Scheduler::instance().synchronize_stream(stream);
  }
}

inline Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  auto lock = Scheduler::instance().lock();
  Scheduler::instance().check_fault();
  if (src.is_privateuseone() && dst.is_privateuseone()) {
    copy_within(src, dst);
  } else {
    copy_over_link(src, dst, non_blocking);
  }
  return dst;
}

inline Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}

// ---- tensors without kernels ----

inline Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                                  std::optional<at::Layout>, std::optional<at::Device> device,
                                  std::optional<bool> pin_memory, std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &DeviceMemory::instance(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), memory_format);
}

inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &DeviceMemory::instance(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

inline void grow_storage(const Tensor& t) {
  const auto needed = static_cast<size_t>(reach_nbytes(t));
  if (t.storage().nbytes() < needed) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), needed);
}

inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  grow_storage(self);
  return self;
}

inline Tensor& set_storage_offset(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                                  c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(storage), offset, size, stride);
  if (stride.size() == size.size()) {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
  }
  grow_storage(self);
  return self;
}
inline Tensor& set_storage(Tensor& self, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(storage), 0, {numel}, {});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline at::Scalar local_scalar_dense(const Tensor& t) {
  auto lock = Scheduler::instance().lock();
  Scheduler::instance().synchronize_stream(current_stream(t.device().index()));
  return host_view(t).item();
}

inline void record_stream(Tensor& t, c10::Stream stream) {
  DeviceMemory::instance().recordStream(t.storage().data_ptr(), stream);
}

// ---- everything else: one launch through the CPU's kernel ----

class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), num_args_(op.schema().arguments().size()), first_(stack->size() - num_args_) {}

  void run() {
    auto lock = Scheduler::instance().lock();
    Scheduler::instance().check_fault();
    for (size_t i = 0; i < num_args_; ++i) {
      const c10::AliasInfo* info = op_.schema().arguments()[i].alias_info();
      operands_.push_back(convert(argument(i), info != nullptr && info->isWrite()));
    }
    if (device_ < 0) device_ = ThreadContext::instance().device;
    const c10::DeviceGuard guard(c10::Device(kSim, static_cast<c10::DeviceIndex>(device_)));
    stream_ = current_stream(device_);
    auto results = std::make_shared<Stack>();
    const bool can_wait = deferrable();
    Scheduler::instance().submit(stream_, {Engine::kCompute, nbytes_}, can_wait,
                                 [op = op_, operands = operands_, results] {
                                   const DeviceSide scope;
                                   *results = operands;
                                   op.callBoxed(results.get());
                                 });
    for (auto& [target, value] : resized_outputs_) {
      at::native::resize_output(target, value.sizes());
      copy_from(value, target, false);
    }
    give_back(*results);
  }

 private:
  const c10::IValue& argument(size_t i) const { return (*stack_)[first_ + i]; }

  c10::IValue convert(const c10::IValue& value, bool written) {
    if (value.isTensor()) return convert(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(convert(t, written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
        list.push_back(t ? std::optional<Tensor>(convert(*t, written)) : t);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kSim) {
      if (device_ < 0 && value.toDevice().has_index()) device_ = value.toDevice().index();
      return c10::Device(at::kCPU);
    }
    return value;
  }

  Tensor convert(const Tensor& t, bool written) {
    if (!t.defined()) return t;
    if (!t.is_privateuseone()) return host_operand(t, written);
    if (device_ < 0) device_ = t.device().index();
    TORCH_CHECK(t.device().index() == device_, name(), ": tensors on different sim devices");
    nbytes_ += nbytes(t);
    writes_ |= written;
    if (written && t.numel() == 0) {  // an out= argument that the kernel will give its size
      const DeviceSide scope;
      resized_outputs_.emplace_back(t, at::empty({0}, t.options().device(at::kCPU)));
      return resized_outputs_.back().second;
    }
    return host_view(t);
  }

  // A device reads host memory only by copies. Exceptions, as on CUDA: scalars, and indices.
  Tensor host_operand(const Tensor& t, bool written) const {
    const bool index = name() == "aten::index" || name() == "aten::index_put_" || name() == "aten::_index_put_impl_";
    TORCH_CHECK(!written && (t.dim() == 0 || index), name(),
                ": expected all tensors to be on the same device, found a ", written ? "written " : "", t.dim(),
                "-dimensional operand on ", t.device(), " and others on sim");
    return snapshot(t);
  }

  // Work can wait if the host needs nothing of it now: no new values, no sizes, no random numbers (they would be
  // drawn in the order of execution).
  bool deferrable() const {
    bool in_place = true;
    for (const c10::Argument& result : op_.schema().returns()) {
      in_place &= result.alias_info() != nullptr && result.alias_info()->isWrite();
    }
    return in_place && writes_ && resized_outputs_.empty() && !op_.hasTag(at::Tag::nondeterministic_seeded);
  }

  // Written arguments are returned as themselves; fresh values of the CPU kernel become device tensors.
  void give_back(const Stack& results) {
    Stack returned;
    for (size_t i = 0; i < op_.schema().returns().size(); ++i) {
      const c10::AliasInfo* info = op_.schema().returns()[i].alias_info();
      returned.push_back(info != nullptr ? aliased_argument(*info) : to_device(results.at(i)));
    }
    torch::jit::drop(*stack_, num_args_);
    for (c10::IValue& value : returned) stack_->push_back(std::move(value));
  }

  c10::IValue aliased_argument(const c10::AliasInfo& info) const {
    for (size_t i = 0; i < num_args_; ++i) {
      const c10::AliasInfo* candidate = op_.schema().arguments()[i].alias_info();
      if (info.isWrite() && candidate != nullptr && *candidate == info) return argument(i);
    }
    TORCH_CHECK(false, "sim: the view operator ", name(), " has no kernel");
  }

  c10::IValue to_device(const c10::IValue& value) const {
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(to_device(t));
    return list;
  }

  Tensor to_device(const Tensor& value) const {
    if (!value.defined()) return value;
    const c10::Device device(kSim, static_cast<c10::DeviceIndex>(device_));
    Tensor result = simaccel::empty_strided(value.sizes(), value.strides(), value.scalar_type(), {}, device, {});
    if (value.numel() > 0) {
      Scheduler::instance().submit(stream_, {}, true, [value, to = host_view(result)] {
        const DeviceSide scope;
        to.copy_(value);
      });
    }
    return result;
  }

  std::string_view name() const { return op_.schema().name(); }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  size_t num_args_;
  size_t first_;
  Stack operands_;
  std::vector<std::pair<Tensor, Tensor>> resized_outputs_;
  double nbytes_ = 0;
  int device_ = -1;
  int stream_ = -1;
  bool writes_ = false;
};

inline void launch(const c10::OperatorHandle& op, Stack* stack) { Launch(op, stack).run(); }

}  // namespace simaccel
