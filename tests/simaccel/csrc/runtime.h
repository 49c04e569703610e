// What torch asks of a device: guards, streams, events, generators, and resizing of storages.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simaccel {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

inline c10::Stream torch_stream(int device, int stream) {
  const c10::StreamId id = Scheduler::instance().is_default(stream) ? 0 : stream;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, static_cast<c10::DeviceIndex>(device)), id);
}

class DeviceGuardImpl final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Device getDevice() const override { return {kSim, ThreadContext::instance().device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kNumDevices, "sim: there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) ThreadContext::instance().device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    setDevice(device);
    return previous;
  }

  c10::Stream getStream(c10::Device device) const override {
    return torch_stream(index(device), current_stream(index(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return torch_stream(index(device), index(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto lock = scheduler().lock();
    return torch_stream(index(device), scheduler().new_stream(index(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = getStream(stream.device());
    ThreadContext::instance().stream.at(stream.device_index()) = stream_index(stream);
    return previous;
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto lock = scheduler().lock();
    Event event = scheduler().record(stream_index(stream));
    return scheduler().poll(event);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    auto lock = scheduler().lock();
    scheduler().synchronize_stream(stream_index(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    auto lock = scheduler().lock();
    scheduler().synchronize_device(device < 0 ? ThreadContext::instance().device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    DeviceMemory::instance().recordStream(ptr, stream);
  }

  void record(void** handle, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    auto lock = scheduler().lock();
    if (*handle == nullptr) *handle = new Event;
    event(*handle) = scheduler().record(stream_index(stream));
  }
  void block(void* handle, const c10::Stream& stream) const override {
    if (handle == nullptr) return;
    auto lock = scheduler().lock();
    scheduler().wait(stream_index(stream), event(handle));
  }
  bool queryEvent(void* handle) const override {
    if (handle == nullptr) return true;
    auto lock = scheduler().lock();
    return scheduler().poll(event(handle));
  }
  void synchronizeEvent(void* handle) const override {
    if (handle == nullptr) return;
    auto lock = scheduler().lock();
    scheduler().synchronize(event(handle));
  }
  void destroyEvent(void* handle, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(handle);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {  // virtual milliseconds
    return (event(end).secs - event(start).secs) * 1e3;
  }

 private:
  static Scheduler& scheduler() { return Scheduler::instance(); }
  static Event& event(void* handle) { return *static_cast<Event*>(handle); }
  static c10::DeviceIndex index(c10::Device device) {
    return device.has_index() ? device.index() : ThreadContext::instance().device;
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return guard_.getDevice().index(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { guard_.setDevice({kSim, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex previous = getCurrentDevice();
    if (device >= 0) setCurrentDevice(device);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  bool isPinnedPtr(const void* ptr) const override { return PinnedMemory::instance().is_pinned(ptr); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::instance(); }

  // Kernels run on the CPU, so they draw from CPU generators, in program order (see Launch).
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    const c10::DeviceGuard guard(impl->device());
    at::DataPtr data = DeviceMemory::instance().allocate(nbytes);
    const size_t kept = std::min(nbytes, impl->nbytes());
    if (kept > 0) {
      auto lock = Scheduler::instance().lock();
      void* dst = AddressSpace::instance().bytes(data.get());
      const void* src = AddressSpace::instance().bytes(impl->data());
      Scheduler::instance().submit(current_stream(impl->device().index()),
                                   {Engine::kCompute, 2.0 * static_cast<double>(kept)}, true,
                                   [=] { std::memcpy(dst, src, kept); });
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }

 private:
  DeviceGuardImpl guard_;
};

}  // namespace simaccel
