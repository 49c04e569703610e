// Streams, the order of their work, and when the work happens.
//
// A stream is a queue. Work placed on it runs in order, on the thread whose call made it run, at a moment that the
// policy picks among all legal moments: no thread, no clock, so one schedule is one reproducible run. Running work
// runs everything that is ordered before it, and nothing else.
#pragma once

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace simaccel {

constexpr int kNumDevices = 2;

enum class Policy : int64_t {
  kEager = 0,   // every stream runs its work when it is submitted
  kLazy = 1,    // no work runs before something ordered after it needs it
  kRandom = 2,  // every call lets a random part of the pending work run
  kMask = 3,    // each stream is fast (as eager) or slow (as lazy), by its own flag
};

// The state "the first `count` items of the stream have run".
struct Position {
  int stream = -1;
  uint64_t count = 0;
};

struct Event {
  Position at;
  double secs = 0;         // virtual time at which the position is reached
  int fruitless_polls = 0;
};

// What a unit of work occupies while it runs: decides which work could overlap in the virtual time.
enum class Engine { kCompute, kH2D, kD2H };

struct Cost {
  Engine engine = Engine::kCompute;
  double nbytes = 0;
};

// The thread has not got the interpreter lock in here, if it had it. Found by name: no Python header is needed.
class WithoutInterpreter {
 public:
  WithoutInterpreter() {
    static const auto has = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (has != nullptr && has() == 1) thread_ = save();
  }
  ~WithoutInterpreter() {
    static const auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (thread_ != nullptr) restore(thread_);
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  void* thread_ = nullptr;
};

class Scheduler {
 public:
  using Lock = std::unique_lock<std::recursive_mutex>;

  static Scheduler& instance() {
    static Scheduler scheduler;
    return scheduler;
  }

  // Everything below, and the allocators, is guarded by this one lock. Who has it may need the interpreter lock: the
  // first and the last reference to a tensor that Python knows take it. So nobody waits for it with that one in hand.
  Lock lock() {
    Lock held(mutex_, std::try_to_lock);
    if (!held.owns_lock()) {
      const WithoutInterpreter released;
      held.lock();
    }
    return held;
  }

  // ---- streams: stream d is the default stream of device d ----

  int new_stream(int device) {
    streams_.push_back({.device = device, .ordinal = next_ordinal_.at(device)++});
    return static_cast<int>(streams_.size()) - 1;
  }

  int device_of(int stream) const { return streams_.at(stream).device; }
  bool is_default(int stream) const { return stream < kNumDevices; }
  Position tail(int stream) const { return {stream, streams_.at(stream).submitted}; }

  // ---- policy ----

  void set_policy(Policy policy) {
    run_all();
    policy_ = policy;
  }
  void set_seed(uint64_t seed) { random_.seed(seed); }
  // Bit i of the mask makes the i-th stream of a device slow, in order of creation; the default stream is 0.
  void set_slow_mask(uint64_t mask) {
    slow_mask_ = mask;
    for (Stream& stream : streams_) stream.slow.reset();
  }
  void set_slow(int stream, bool slow) { streams_.at(stream).slow = slow; }

  // ---- work ----

  // Appends work to the stream. Work that is not `deferrable`, or on a fast stream, runs now: its errors reach the
  // caller, as those of a bad launch do. Errors of work that runs later are faults of the device.
  void submit(int stream, Cost cost, bool deferrable, std::function<void()> run) {
    Stream& s = streams_.at(stream);
    const auto engine = static_cast<size_t>(cost.engine);
    const double start = std::max({s.secs, host_secs_, engine_secs_[engine]});
    s.secs = engine_secs_[engine] = start + cost.nbytes / kBytesPerSec[engine];
    if (deferrable && !runs_at_once(s)) {
      s.pending.push_back({std::move(run), {}});
      ++s.submitted;
      progress();
      return;
    }
    run_until(tail(stream));
    ++s.submitted;
    ++s.finished;
    if (!fault_) run();
  }

  // Later work of `stream` waits for the event.
  void wait(int stream, const Event& event) {
    check_fault();
    Stream& s = streams_.at(stream);
    s.secs = std::max(s.secs, event.secs);
    s.pending.push_back({nullptr, event.at});
    ++s.submitted;
    if (runs_at_once(s)) {
      run_until(tail(stream));
    } else {
      progress();
    }
  }

  Event record(int stream) {
    check_fault();
    progress();
    return {tail(stream), std::max(streams_.at(stream).secs, host_secs_)};
  }

  bool reached(Position position) const {
    return position.stream < 0 || streams_.at(position.stream).finished >= position.count;
  }

  // A loop that polls must end, also when nothing else would make the work run.
  bool poll(Event& event) {
    progress();
    const bool done = reached(event.at);
    if (!done && ++event.fruitless_polls % kPollsBeforeProgress == 0) run_until(event.at);
    check_fault();  // last: the event of work that failed a moment ago is not complete
    return done;
  }

  void synchronize(const Event& event) {
    run_until(event.at);
    host_secs_ = std::max(host_secs_, event.secs);
    check_fault();
  }
  void synchronize_stream(int stream) { synchronize({tail(stream), streams_.at(stream).secs}); }
  void synchronize_device(int device) {
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (streams_[i].device == device) synchronize_stream(static_cast<int>(i));
    }
  }

  // Runs the work up to the position and all that it waits for. Never throws: it is called from destructors.
  void run_until(Position position) {
    if (position.stream < 0) return;
    while (!reached(position)) {
      Item item = std::move(streams_[position.stream].pending.front());
      streams_[position.stream].pending.pop_front();
      run_until(item.after);
      execute(item);
      ++streams_[position.stream].finished;
    }
  }
  void run_all() {
    for (size_t i = 0; i < streams_.size(); ++i) run_until(tail(static_cast<int>(i)));
  }

  // ---- faults: work that fails when it runs poisons the device, and every later call says so, as on hardware ----

  void check_fault() const {
    TORCH_CHECK(!fault_, "sim: the device failed in earlier asynchronous work: ", fault_.value_or(""));
  }

  // Drops the fault and the policy, and numbers streams from 1 again.
  void reset() {
    run_all();
    fault_.reset();
    set_policy(Policy::kEager);
    set_slow_mask(0);
    set_seed(0);
    next_ordinal_.fill(1);
  }

  int64_t num_pending() const {
    size_t total = 0;
    for (const Stream& stream : streams_) total += stream.pending.size();
    return static_cast<int64_t>(total);
  }

  // The virtual time at which all submitted work is done.
  double virtual_secs() const {
    double latest = host_secs_;
    for (const Stream& stream : streams_) latest = std::max(latest, stream.secs);
    return latest;
  }

 private:
  struct Item {
    std::function<void()> run;  // empty for a wait
    Position after;
  };
  struct Stream {
    int device = 0;
    int ordinal = 0;
    std::deque<Item> pending = {};
    uint64_t submitted = 0;
    uint64_t finished = 0;
    double secs = 0;  // virtual time at which the submitted work is done
    std::optional<bool> slow = {};
  };

  Scheduler() {
    for (int device = 0; device < kNumDevices; ++device) streams_.push_back({.device = device});
    next_ordinal_.fill(1);
  }

  bool runs_at_once(const Stream& s) const {
    if (policy_ == Policy::kEager) return true;
    if (policy_ != Policy::kMask) return false;
    return !s.slow.value_or(s.ordinal < 64 && (slow_mask_ >> s.ordinal & 1));
  }

  void execute(const Item& item) {
    if (!item.run || fault_) return;  // a failed device does nothing more: what later work would write stays as it is
    try {
      item.run();
    } catch (const c10::Error& error) {
      fault_ = error.what_without_backtrace();
    } catch (const std::exception& error) {
      fault_ = error.what();
    }
  }

  void progress() {
    if (policy_ != Policy::kRandom) return;
    for (size_t i = 0; i < streams_.size(); ++i) {
      const uint64_t pending = streams_[i].submitted - streams_[i].finished;
      if (pending == 0 || random_() % 3 != 0) continue;
      run_until({static_cast<int>(i), streams_[i].finished + 1 + random_() % pending});
    }
  }

  static constexpr int kPollsBeforeProgress = 4;
  // Virtual bandwidths in order of Engine: device memory, and a link that works in both directions at once.
  static constexpr std::array<double, 3> kBytesPerSec = {1000e9, 25e9, 25e9};

  std::recursive_mutex mutex_;
  std::deque<Stream> streams_;  // a deque: references stay valid while streams are added
  std::array<int, kNumDevices> next_ordinal_{};
  Policy policy_ = Policy::kEager;
  uint64_t slow_mask_ = 0;
  std::mt19937_64 random_{0};
  std::optional<std::string> fault_;
  std::array<double, 3> engine_secs_{};
  double host_secs_ = 0;
};

}  // namespace simaccel
