// Device memory from a caching allocator whose blocks belong to streams, and pinned host memory.
//
// The rules are those of torch's CUDA allocators. A freed block goes back to the stream that was current when it was
// allocated, at once for the host, while the device may still use it: what another stream does with it needs an event
// or record_stream. Garbage makes broken rules visible: a block is filled with NaN, in the order of its owning stream,
// whenever somebody else could get it.
#pragma once

#include "address_space.h"
#include "scheduler.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace simaccel {

// The current device and streams of a thread.
struct ThreadContext {
  c10::DeviceIndex device = 0;
  std::array<int, kNumDevices> stream{};

  ThreadContext() {
    for (int d = 0; d < kNumDevices; ++d) stream[d] = d;
  }
  static ThreadContext& instance() {
    thread_local ThreadContext context;
    return context;
  }
};

inline int current_stream(int device) { return ThreadContext::instance().stream.at(device); }

// torch's id of every default stream is 0; the scheduler numbers the streams of all devices together.
inline int stream_index(const c10::Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}

// Fails the n-th of the coming calls, once. 0 is never.
class Injection {
 public:
  void arm(int64_t nth) { countdown_ = nth; }
  bool fires() { return countdown_ > 0 && --countdown_ == 0; }

 private:
  int64_t countdown_ = 0;
};

// NaN as float64, float32, bfloat16 and float16.
inline void fill_with_garbage(void* bytes, size_t nbytes) {
  auto* words = static_cast<uint16_t*>(bytes);
  std::fill(words, words + nbytes / 2, uint16_t{0x7fff});
}

inline bool all_reached(const std::vector<Position>& positions) {
  const auto reached = [](Position p) { return Scheduler::instance().reached(p); };
  return std::all_of(positions.begin(), positions.end(), reached);
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  static DeviceMemory& instance() {
    static auto* memory = new DeviceMemory;  // never destroyed: tensors may outlive static destructors
    return *memory;
  }

  at::DataPtr allocate(size_t nbytes) override {
    auto lock = scheduler().lock();
    const c10::DeviceIndex device = ThreadContext::instance().device;
    const c10::Device where(c10::DeviceType::PrivateUse1, device);
    if (nbytes == 0) return {nullptr, nullptr, &release, where};
    const int stream = current_stream(device);
    const size_t size = (nbytes + kRounding - 1) / kRounding * kRounding;
    const bool fail = fail_alloc.fires();
    Block* block = fail ? nullptr : take_cached(stream, size);
    if (block == nullptr) block = new_block(device, stream, size, nbytes, fail);
    block->requested = nbytes;
    auto& stats = stats_[device];
    stats.allocated_bytes[0].increase(size);
    stats.requested_bytes[0].increase(nbytes);
    stats.allocation[0].increase(1);
    // Whoever had the block before may have work pending that writes it, on the owning stream. Only that stream, and
    // streams that waited for it, may use the block.
    garble(*block);
    return {block->ptr, block, &release, where};
  }

  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dst, const void* src, size_t nbytes) const override {
    std::memcpy(AddressSpace::instance().bytes(dst), AddressSpace::instance().bytes(src), nbytes);
  }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    auto lock = scheduler().lock();
    for (int device = 0; device < kNumDevices; ++device) release_cached(device);
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    auto lock = scheduler().lock();
    if (auto* block = static_cast<Block*>(ptr.get_context())) block->used_by.push_back(stream_index(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto lock = scheduler().lock();
    return stats_.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    auto lock = scheduler().lock();
    for (auto* stat : tracked(device)) stat->reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    auto lock = scheduler().lock();
    for (auto* stat : tracked(device)) stat->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto lock = scheduler().lock();
    const auto total = static_cast<size_t>(capacity);
    return {total - std::min(total, static_cast<size_t>(stats_.at(device).reserved_bytes[0].current)), total};
  }

  static constexpr int64_t kDefaultCapacity = int64_t{1} << 34;
  int64_t capacity = kDefaultCapacity;  // of each device
  Injection fail_alloc;

 private:
  struct Block {
    char* ptr;
    size_t size;
    size_t requested;
    int device;
    int stream;                          // the owner
    std::vector<int> used_by = {};       // record_stream
    std::vector<Position> in_use = {};   // once freed: the work that record_stream announced
  };

  static Scheduler& scheduler() { return Scheduler::instance(); }

  static void garble(const Block& block) {
    void* bytes = AddressSpace::instance().bytes(block.ptr);
    scheduler().submit(block.stream, {}, true, [bytes, size = block.size] { fill_with_garbage(bytes, size); });
  }

  static void release(void* context) {
    if (context != nullptr) instance().free(static_cast<Block*>(context));
  }

  void free(Block* block) {
    auto lock = scheduler().lock();
    auto& stats = stats_[block->device];
    stats.allocated_bytes[0].decrease(block->size);
    stats.requested_bytes[0].decrease(block->requested);
    stats.allocation[0].decrease(1);
    for (int stream : block->used_by) block->in_use.push_back(scheduler().tail(stream));
    block->used_by.clear();
    // Anybody's next operation may get a block of the default stream, so it is garbage from here on. A side stream's
    // block comes back only to code that allocates under that stream, which first orders the stream after what used
    // the block (FSDP2 does): garbage comes with the next allocation.
    if (scheduler().is_default(block->stream) && block->in_use.empty()) garble(*block);
    cache_.insert({{block->stream, block->size}, block});
  }

  Block* take_cached(int stream, size_t size) {
    auto [it, end] = cache_.equal_range({stream, size});
    for (; it != end; ++it) {
      Block* block = it->second;
      if (!all_reached(block->in_use)) continue;
      block->in_use.clear();
      cache_.erase(it);
      return block;
    }
    return nullptr;
  }

  Block* new_block(c10::DeviceIndex device, int stream, size_t size, size_t nbytes, bool fail) {
    auto& stats = stats_[device];
    const auto fits = [&] { return stats.reserved_bytes[0].current + static_cast<int64_t>(size) <= capacity; };
    if (!fail && !fits()) {
      ++stats.num_alloc_retries;
      release_cached(device);
    }
    if (fail || !fits()) {
      ++stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", static_cast<int>(device), " out of memory",
                       fail ? " (injected)" : "", ". Tried to allocate ", nbytes, " bytes; ",
                       stats.allocated_bytes[0].current, " allocated, ", stats.reserved_bytes[0].current,
                       " reserved of a capacity of ", capacity, ".");
    }
    auto* block = new Block{AddressSpace::instance().map(size), size, nbytes, device, stream};
    stats.reserved_bytes[0].increase(size);
    stats.segment[0].increase(1);
    ++stats.num_device_alloc;
    return block;
  }

  // Returns the cached blocks of the device to the driver, which first waits for all work.
  void release_cached(int device) {
    scheduler().run_all();
    for (auto it = cache_.begin(); it != cache_.end();) {
      std::unique_ptr<Block> block(it->second);
      if (block->device != device) {
        block.release();
        ++it;
        continue;
      }
      it = cache_.erase(it);
      AddressSpace::instance().unmap(block->ptr, block->size);
      stats_[device].reserved_bytes[0].decrease(block->size);
      stats_[device].segment[0].decrease(1);
      ++stats_[device].num_device_free;
    }
  }

  std::array<c10::CachingAllocator::Stat*, 5> tracked(c10::DeviceIndex device) {
    auto& stats = stats_.at(device);
    return {&stats.allocated_bytes[0], &stats.requested_bytes[0], &stats.reserved_bytes[0], &stats.allocation[0],
            &stats.segment[0]};
  }

  static constexpr size_t kRounding = 512;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kNumDevices> stats_;
  std::multimap<std::pair<int, size_t>, Block*> cache_;  // by owning stream and size: only exact fits are reused
};

// Pinned memory is ordinary host memory that asynchronous copies accept. A freed block stays mapped until the copies
// that use it have run, and its next owner gets other pages.
class PinnedMemory final : public at::HostAllocator {
 public:
  static PinnedMemory& instance() {
    static auto* memory = new PinnedMemory;
    return *memory;
  }

  at::DataPtr allocate(size_t nbytes) override {
    auto lock = Scheduler::instance().lock();
    if (nbytes == 0) return {nullptr, nullptr, &release, at::Device(at::kCPU)};
    TORCH_CHECK(!fail_pin.fires(), "sim: pinned host allocation of ", nbytes, " bytes failed (injected)");
    unmap_idle();
    void* ptr = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(ptr != MAP_FAILED, "sim: cannot map ", nbytes, " bytes of host memory");
    fill_with_garbage(ptr, nbytes);
    stats_.allocated_bytes.increase(nbytes);
    stats_.active_bytes.increase(nbytes);
    ++stats_.num_host_alloc;
    Region& region = regions_[reinterpret_cast<uintptr_t>(ptr)] = {nbytes, true, {}};
    return {ptr, &region, &release, at::Device(at::kCPU)};
  }

  // Pins memory that somebody else owns, as cudaHostRegister does.
  void register_range(void* ptr, size_t nbytes) {
    auto lock = Scheduler::instance().lock();
    TORCH_CHECK(find(ptr) == nullptr, "sim: the host memory is already pinned");
    regions_[reinterpret_cast<uintptr_t>(ptr)] = {nbytes, false, {}};
  }
  void unregister_range(void* ptr) {
    auto lock = Scheduler::instance().lock();
    auto it = regions_.find(reinterpret_cast<uintptr_t>(ptr));
    TORCH_CHECK(it != regions_.end() && !it->second.owned, "sim: the host memory was not registered");
    for (Position use : it->second.in_use) Scheduler::instance().run_until(use);
    regions_.erase(it);
  }

  bool is_pinned(const void* ptr) {
    auto lock = Scheduler::instance().lock();
    return find(ptr) != nullptr;
  }

  // Announces that work submitted to the stream so far uses the memory.
  void mark_used(const void* ptr, int stream) {
    if (Region* region = find(ptr)) region->in_use.push_back(Scheduler::instance().tail(stream));
  }

  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dst, const void* src, size_t nbytes) const override { std::memcpy(dst, src, nbytes); }
  bool record_event(void* ptr, void*, c10::Stream stream) override {
    auto lock = Scheduler::instance().lock();
    mark_used(ptr, stream_index(stream));
    return true;
  }
  void empty_cache() override {
    auto lock = Scheduler::instance().lock();
    unmap_idle();
  }
  at::HostStats get_stats() override {
    auto lock = Scheduler::instance().lock();
    return stats_;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    auto lock = Scheduler::instance().lock();
    stats_.allocated_bytes.reset_peak();
    stats_.active_bytes.reset_peak();
  }

  Injection fail_pin;

 private:
  struct Region {
    size_t nbytes = 0;
    bool owned = false;  // by this allocator, not registered
    std::vector<Position> in_use = {};
    bool freed = false;
  };

  static void release(void* context) {
    if (context == nullptr) return;
    auto lock = Scheduler::instance().lock();
    auto* region = static_cast<Region*>(context);
    region->freed = true;
    instance().stats_.active_bytes.decrease(region->nbytes);
    instance().unmap_idle();
  }

  Region* find(const void* ptr) {
    const auto address = reinterpret_cast<uintptr_t>(ptr);
    auto it = regions_.upper_bound(address);
    if (it == regions_.begin()) return nullptr;
    --it;
    return address < it->first + it->second.nbytes && !it->second.freed ? &it->second : nullptr;
  }

  void unmap_idle() {
    for (auto it = regions_.begin(); it != regions_.end();) {
      Region& region = it->second;
      std::erase_if(region.in_use, [](Position use) { return Scheduler::instance().reached(use); });
      if (!region.freed || !region.in_use.empty()) {
        ++it;
        continue;
      }
      munmap(reinterpret_cast<void*>(it->first), region.nbytes);
      stats_.allocated_bytes.decrease(region.nbytes);
      ++stats_.num_host_free;
      it = regions_.erase(it);
    }
  }

  std::map<uintptr_t, Region> regions_;  // nodes do not move: a DataPtr's context points to its region
  at::HostStats stats_;
};

}  // namespace simaccel
