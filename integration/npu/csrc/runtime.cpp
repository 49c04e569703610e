// A CANN runtime without a device: what torch_npu asks of Ascend's driver, done with host memory and threads.
//
// Device memory is host memory that this file has handed out, streams are threads that run in order, events
// are counters. Kernels are not simulated: operators are replaced in Python (operators.py), and whatever
// would launch one ends the process with its name.
//
// What it is for: torch_npu above it is the published binary. Its allocators, its task queue, its tests for
// pinned memory and its handling of errors are the real ones.
//
// Signatures are those of the CANN 9 headers, with `int` for the enumerations and `void *` for handles.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#define API extern "C" __attribute__((visibility("default")))

namespace {

// aclError
constexpr int kSuccess = 0;
constexpr int kInvalidParam = 107000;
constexpr int kNoContext = 107002;  // torch_npu reads it as "no device set on this thread yet"
constexpr int kOutOfMemory = 207001;

// aclrtMemcpyKind
constexpr int kHostToDevice = 1;
constexpr int kDeviceToHost = 2;
constexpr int kDeviceToDevice = 3;

// ----------------------------------------------------------------------------------------------- memory

constexpr size_t kCapacity = size_t{1} << 30;
constexpr size_t kDeviceAlignment = 512;
const size_t kPageSize = sysconf(_SC_PAGESIZE);

size_t round_up(size_t nbytes, size_t alignment) { return (nbytes + alignment - 1) / alignment * alignment; }

// Blocks by address. Not thread safe by itself.
class Blocks {
 public:
  void add(void *block, size_t nbytes) {
    sizes_[address(block)] = nbytes;
    total_ += nbytes;
  }

  size_t remove(void *block) {
    auto found = sizes_.find(address(block));
    if (found == sizes_.end()) return 0;
    size_t nbytes = found->second;
    total_ -= nbytes;
    sizes_.erase(found);
    return nbytes;
  }

  bool contain(const void *pointer, size_t nbytes = 1) const {
    auto after = sizes_.upper_bound(address(pointer));
    if (after == sizes_.begin()) return false;
    auto &[start, size] = *std::prev(after);
    return address(pointer) + nbytes <= start + size;
  }

  size_t total() const { return total_; }

 private:
  static uintptr_t address(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

  std::map<uintptr_t, size_t> sizes_;
  size_t total_ = 0;
};

std::mutex memory_mutex;
Blocks device_blocks;
Blocks pinned_blocks;  // allocated as pinned, or registered

int allocate_device(void **block, size_t nbytes) {
  std::lock_guard lock(memory_mutex);
  if (device_blocks.total() + nbytes > kCapacity) return kOutOfMemory;
  *block = aligned_alloc(kDeviceAlignment, round_up(nbytes, kDeviceAlignment));
  memset(*block, 0xCD, nbytes);  // nobody may rely on zeros
  device_blocks.add(*block, nbytes);
  return kSuccess;
}

int allocate_pinned(void **block, size_t nbytes) {
  std::lock_guard lock(memory_mutex);
  *block = aligned_alloc(kPageSize, round_up(nbytes, kPageSize));
  pinned_blocks.add(*block, nbytes);
  return kSuccess;
}

int register_host(void *block, size_t nbytes) {
  // As the driver does (error 507899): part of a page cannot be pinned.
  if (reinterpret_cast<uintptr_t>(block) % kPageSize != 0 || nbytes % kPageSize != 0) return 507899;
  std::lock_guard lock(memory_mutex);
  pinned_blocks.add(block, nbytes);
  return kSuccess;
}

// ------------------------------------------------------------------------------------ streams and events

class Stream {
 public:
  Stream() : id_(next_id_++), worker_([this] { run(); }) {
    std::lock_guard lock(all_mutex_);
    all_.insert(this);
  }

  ~Stream() {
    {
      std::lock_guard lock(all_mutex_);
      all_.erase(this);
    }
    submit(nullptr);
    worker_.join();
  }

  void submit(std::function<void()> job) {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    submitted_.notify_one();
  }

  void synchronize() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return is_idle_locked(); });
  }

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return is_idle_locked();
  }

  int id() const { return id_; }

  static void synchronize_all() {
    std::set<Stream *> streams;
    {
      std::lock_guard lock(all_mutex_);
      streams = all_;
    }
    for (Stream *stream : streams) stream->synchronize();
  }

 private:
  bool is_idle_locked() const { return jobs_.empty() && !running_; }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      submitted_.wait(lock, [this] { return !jobs_.empty(); });
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      if (!job) return;
      running_ = true;
      lock.unlock();
      job();
      lock.lock();
      running_ = false;
      if (jobs_.empty()) idle_.notify_all();
    }
  }

  static inline std::atomic<int> next_id_{1};
  static inline std::mutex all_mutex_;
  static inline std::set<Stream *> all_;

  int id_;
  std::mutex mutex_;
  std::condition_variable submitted_, idle_;
  std::deque<std::function<void()>> jobs_;
  bool running_ = false;
  std::thread worker_;  // last: it uses everything above
};

Stream *stream_of(void *handle) {
  static auto *default_stream = new Stream;  // never destroyed: its thread may outlive static objects
  return handle != nullptr ? static_cast<Stream *>(handle) : default_stream;
}

double now_millis() {
  using Millis = std::chrono::duration<double, std::milli>;
  return Millis(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Recorded n times, reached n times. Queued work shares it: torch_npu may destroy its handle earlier.
class EventState {
 public:
  uint64_t record() {
    std::lock_guard lock(mutex_);
    return ++recorded_;
  }

  void reach(uint64_t point) {
    std::lock_guard lock(mutex_);
    reached_ = std::max(reached_, point);
    millis_ = now_millis();
    changed_.notify_all();
  }

  uint64_t last_point() {
    std::lock_guard lock(mutex_);
    return recorded_;
  }

  void wait(uint64_t point) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= point; });
  }

  bool is_complete() {
    std::lock_guard lock(mutex_);
    return reached_ >= recorded_;
  }

  double millis() {
    std::lock_guard lock(mutex_);
    return millis_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0, reached_ = 0;
  double millis_ = 0;
};

using Event = std::shared_ptr<EventState>;

Event &event_of(void *handle) { return *static_cast<Event *>(handle); }

// --------------------------------------------------------------------------- control, by the tests (ctypes)

std::atomic<int> copies_until_failure{0};  // 0: never
std::mutex hold_mutex;
std::condition_variable hold_changed;
bool copies_are_held = false;

bool is_refused(const void *target, const void *source, size_t nbytes, int kind) {
  int left = copies_until_failure.load();
  while (left > 0 && !copies_until_failure.compare_exchange_weak(left, left - 1)) {
  }
  if (left == 1) return true;
  std::lock_guard lock(memory_mutex);
  bool to_device = kind == kHostToDevice || kind == kDeviceToDevice;
  bool from_device = kind == kDeviceToHost || kind == kDeviceToDevice;
  return (to_device && !device_blocks.contain(target, nbytes)) ||
         (from_device && !device_blocks.contain(source, nbytes));
}

[[noreturn]] void not_simulated(const char *name) {
  fprintf(stderr, "simulated CANN: %s is not simulated. Is an operator missing in operators.py?\n", name);
  fflush(stderr);
  abort();
}

thread_local int current_device = -1;
std::atomic<bool> has_context{false};

}  // namespace

// The n-th copy between host and device from now on is refused when torch_npu submits it; 0: none is.
API void simulation_fail_copy(int nth) { copies_until_failure = nth; }

// Streams stop at their next asynchronous copy until they are let go.
API void simulation_hold_copies(int held) {
  std::lock_guard lock(hold_mutex);
  copies_are_held = held != 0;
  hold_changed.notify_all();
}

API size_t simulation_pinned_nbytes() {
  std::lock_guard lock(memory_mutex);
  return pinned_blocks.total();
}

// ---------------------------------------------------------------------------------------------- devices

API int aclInit(const char *) { return kSuccess; }
API int aclFinalize() { return kSuccess; }

API int aclrtGetDeviceCount(uint32_t *count) {
  *count = 1;
  return kSuccess;
}

API const char *aclrtGetSocName() { return "Ascend910B1"; }
API int aclrtResetDevice(int32_t) { return kSuccess; }
API int aclrtResetDeviceForce(int32_t) { return kSuccess; }
API int aclrtSetCurrentContext(void *) { return kSuccess; }

API int aclrtSetDevice(int32_t device) {
  current_device = device;
  has_context = true;
  return kSuccess;
}

API int aclrtGetDevice(int32_t *device) {
  if (current_device < 0) return kNoContext;
  *device = current_device;
  return kSuccess;
}

API int aclrtGetCurrentContext(void **context) {
  static int the_context;
  *context = &the_context;
  return kSuccess;
}

API int aclrtGetPrimaryCtxState(int32_t, uint32_t *flags, int32_t *active) {
  if (flags != nullptr) *flags = 0;
  *active = has_context;
  return kSuccess;
}

API int aclrtSynchronizeDevice() {
  Stream::synchronize_all();
  return kSuccess;
}

API int aclrtSynchronizeDeviceWithTimeout(int32_t) {
  Stream::synchronize_all();
  return kSuccess;
}

API int aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
  *can = 0;
  return kSuccess;
}

// ------------------------------------------------------------------------------------------- versions
// New enough for torch_npu to ask for the attributes of a pointer: that is what makes registered memory count
// as pinned. With SIMULATED_DRIVER=24.1.0 it trusts its own allocator alone, as on older machines.

API int aclsysGetVersionStr(char *, char *version) {
  strcpy(version, "9.1.0");
  return kSuccess;
}

API int aclsysGetCANNVersion(int package, void *version) {
  constexpr int kDriver = 7;
  const char *driver = getenv("SIMULATED_DRIVER");
  strcpy(static_cast<char *>(version), package != kDriver ? "9.1.0" : driver != nullptr ? driver : "25.5.1");
  return kSuccess;
}

// ----------------------------------------------------------------------------------------------- memory

API int aclrtGetMemInfo(int, size_t *free, size_t *total) {
  std::lock_guard lock(memory_mutex);
  *total = kCapacity;
  *free = kCapacity - device_blocks.total();
  return kSuccess;
}

API int aclrtMalloc(void **block, size_t nbytes, int) { return allocate_device(block, nbytes); }
API int aclrtMallocAlign32(void **block, size_t nbytes, int) { return allocate_device(block, nbytes); }
API int aclrtMallocHost(void **block, size_t nbytes) { return allocate_pinned(block, nbytes); }
API int aclrtMallocHostWithCfg(void **block, uint64_t nbytes, void *) { return allocate_pinned(block, nbytes); }

API int aclrtFree(void *block) {
  std::lock_guard lock(memory_mutex);
  memset(block, 0xDD, device_blocks.remove(block));
  free(block);
  return kSuccess;
}

API int aclrtFreeHost(void *block) {
  std::lock_guard lock(memory_mutex);
  pinned_blocks.remove(block);
  free(block);
  return kSuccess;
}

API int aclrtHostRegister(void *block, uint64_t nbytes, int, void **device_pointer) {
  if (device_pointer != nullptr) *device_pointer = block;
  return register_host(block, nbytes);
}

API int aclrtHostRegisterV2(void *block, uint64_t nbytes, uint32_t) { return register_host(block, nbytes); }

API int aclrtHostUnregister(void *block) {
  std::lock_guard lock(memory_mutex);
  return pinned_blocks.remove(block) != 0 ? kSuccess : kInvalidParam;
}

struct PointerAttributes {
  uint32_t device;
  int location;  // 0: pinned host memory, 1: device, 2: unknown to the runtime, so pageable
  uint32_t page_size;
  uint32_t reserved[4];
};

API int aclrtPointerGetAttributes(const void *pointer, PointerAttributes *attributes) {
  std::lock_guard lock(memory_mutex);
  *attributes = {};
  attributes->location = device_blocks.contain(pointer) ? 1 : pinned_blocks.contain(pointer) ? 0 : 2;
  return kSuccess;
}

// ----------------------------------------------------------------------------------------------- copies

API int aclrtMemcpy(void *target, size_t, const void *source, size_t nbytes, int kind) {
  if (is_refused(target, source, nbytes, kind)) return kInvalidParam;
  memcpy(target, source, nbytes);
  return kSuccess;
}

API int aclrtMemcpyAsync(void *target, size_t, const void *source, size_t nbytes, int kind, void *stream) {
  if (is_refused(target, source, nbytes, kind)) return kInvalidParam;
  stream_of(stream)->submit([=] {
    std::unique_lock lock(hold_mutex);
    hold_changed.wait(lock, [] { return !copies_are_held; });
    lock.unlock();
    memcpy(target, source, nbytes);
  });
  return kSuccess;
}

API int aclrtMemcpyAsyncWithCondition(
    void *target, size_t capacity, const void *source, size_t nbytes, int kind, void *stream) {
  return aclrtMemcpyAsync(target, capacity, source, nbytes, kind, stream);
}

API int aclrtMemset(void *target, size_t, int32_t value, size_t nbytes) {
  memset(target, value, nbytes);
  return kSuccess;
}

API int aclrtMemsetAsync(void *target, size_t, int32_t value, size_t nbytes, void *stream) {
  stream_of(stream)->submit([=] { memset(target, value, nbytes); });
  return kSuccess;
}

// ---------------------------------------------------------------------------------------------- streams

API int aclrtCreateStream(void **stream) {
  *stream = new Stream;
  return kSuccess;
}

API int aclrtCreateStreamWithConfig(void **stream, uint32_t, uint32_t) {
  *stream = new Stream;
  return kSuccess;
}

API int aclrtDestroyStream(void *stream) {
  delete static_cast<Stream *>(stream);
  return kSuccess;
}

API int aclrtDestroyStreamForce(void *stream) {
  delete static_cast<Stream *>(stream);
  return kSuccess;
}

API int aclrtStreamGetId(void *stream, int32_t *id) {
  *id = stream_of(stream)->id();
  return kSuccess;
}

API int aclrtSetStreamFailureMode(void *, uint64_t) { return kSuccess; }

API int aclrtSynchronizeStream(void *stream) {
  stream_of(stream)->synchronize();
  return kSuccess;
}

API int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t) {
  stream_of(stream)->synchronize();
  return kSuccess;
}

API int aclrtStreamQuery(void *stream, int *status) {
  *status = stream_of(stream)->is_idle() ? 0 : 1;
  return kSuccess;
}

API int aclrtSetStreamOverflowSwitch(void *, uint32_t) { return kSuccess; }

API int aclrtGetStreamOverflowSwitch(void *, uint32_t *flag) {
  *flag = 0;
  return kSuccess;
}

// No graph is ever being captured.
API int aclmdlRICaptureGetInfo(void *, int *status, void **model) {
  *status = 0;
  if (model != nullptr) *model = nullptr;
  return kSuccess;
}

// ----------------------------------------------------------------------------------------------- events

API int aclrtCreateEvent(void **event) {
  *event = new Event(std::make_shared<EventState>());
  return kSuccess;
}

API int aclrtCreateEventWithFlag(void **event, uint32_t) { return aclrtCreateEvent(event); }
API int aclrtCreateEventExWithFlag(void **event, uint32_t) { return aclrtCreateEvent(event); }

API int aclrtDestroyEvent(void *event) {
  delete static_cast<Event *>(event);
  return kSuccess;
}

API int aclrtResetEvent(void *, void *) { return kSuccess; }

API int aclrtRecordEvent(void *handle, void *stream) {
  Event event = event_of(handle);
  uint64_t point = event->record();
  stream_of(stream)->submit([=] { event->reach(point); });
  return kSuccess;
}

API int aclrtStreamWaitEvent(void *stream, void *handle) {
  Event event = event_of(handle);
  uint64_t point = event->last_point();
  stream_of(stream)->submit([=] { event->wait(point); });
  return kSuccess;
}

API int aclrtSynchronizeEvent(void *handle) {
  Event event = event_of(handle);
  event->wait(event->last_point());
  return kSuccess;
}

API int aclrtSynchronizeEventWithTimeout(void *handle, int32_t) { return aclrtSynchronizeEvent(handle); }

API int aclrtQueryEventStatus(void *handle, int *status) {
  *status = event_of(handle)->is_complete() ? 1 : 0;
  return kSuccess;
}

API int aclrtQueryEventWaitStatus(void *handle, int *status) {
  *status = event_of(handle)->is_complete() ? 0 : 1;
  return kSuccess;
}

API int aclrtEventElapsedTime(float *millis, void *start, void *end) {
  *millis = static_cast<float>(event_of(end)->millis() - event_of(start)->millis());
  return kSuccess;
}

API int aclrtEventGetTimestamp(void *event, uint64_t *micros) {
  *micros = static_cast<uint64_t>(event_of(event)->millis() * 1000);
  return kSuccess;
}

// ---------------------------------------------------------------------------- settings without a meaning

API const char *aclGetRecentErrMsg() { return ""; }
API int aclrtPeekAtLastError(int) { return kSuccess; }
API int aclrtGetLastError(int) { return kSuccess; }
API int aclrtGetDeviceUtilizationRate(int32_t, void *) { return kSuccess; }
API int aclrtSetDeviceSatMode(int) { return kSuccess; }
API int aclrtSetOpExecuteTimeOut(uint32_t) { return kSuccess; }
API int aclrtSetOpWaitTimeout(uint32_t) { return kSuccess; }
API int aclrtSetSysParamOpt(int, int64_t) { return kSuccess; }

API int aclrtGetSysParamOpt(int, int64_t *value) {
  *value = 0;
  return kSuccess;
}

API int aclrtCtxSetSysParamOpt(int, int64_t) { return kSuccess; }

API int aclrtCtxGetSysParamOpt(int, int64_t *value) {
  *value = 0;
  return kSuccess;
}

API int aclSetCompileopt(int, const char *) { return kSuccess; }
API size_t aclGetCompileoptSize(int) { return 64; }

API int aclGetCompileopt(int, char *value, size_t) {
  value[0] = 0;
  return kSuccess;
}

API int aclopSetCompileFlag(int) { return kSuccess; }

API int aclrtSetOpExecuteTimeOutV2(uint64_t, uint64_t *actual) {
  if (actual != nullptr) *actual = 0;
  return kSuccess;
}

// What torch_npu tells the profiler, the log and the dump, whether or not they are on.
#define IGNORED(name) \
  API long name() { return 0; }
// What only exists so that torch_npu can be linked. A call would mean that a kernel is to be launched.
#define NOT_SIMULATED(name) \
  API void name() { not_simulated(#name); }
#include "other_names.h"
