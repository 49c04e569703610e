// Device memory has addresses of its own.
//
// A device pointer lies in a range that the process may not touch, so host code that follows one (memcpy, ctypes,
// a stray CPU kernel) dies at once, as it does on hardware. The bytes live a fixed distance away, where only the
// simulated kernels look. Addresses are never handed out twice: a pointer into memory that went back to the
// "driver" stays invalid for the life of the process.
#pragma once

#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace simaccel {

class AddressSpace {
 public:
  static AddressSpace& instance() {
    static AddressSpace space;
    return space;
  }

  // Returns a device address with at least `nbytes` accessible bytes behind it. One inaccessible page follows.
  char* map(size_t nbytes) {
    const size_t span = pages(nbytes);
    TORCH_CHECK(next_ + span + page_ <= kSpan, "sim: the device address space of ", kSpan, " bytes is used up");
    char* device_ptr = base_ + next_;
    TORCH_CHECK(mprotect(device_ptr + kSpan, span, PROT_READ | PROT_WRITE) == 0, "sim: cannot map ", span, " bytes");
    next_ += span + page_;
    return device_ptr;
  }

  void unmap(char* device_ptr, size_t nbytes) {
    // Mapping over the range both drops the pages and takes the access rights away.
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    void* mapped = mmap(device_ptr + kSpan, pages(nbytes), PROT_NONE, flags, -1, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "sim: cannot unmap device memory");
  }

  bool contains(const void* ptr) const {
    const auto* p = static_cast<const char*>(ptr);
    return p >= base_ && p < base_ + kSpan;
  }

  // Where the bytes behind a device address can be reached by a kernel.
  void* bytes(const void* device_ptr) const {
    TORCH_INTERNAL_ASSERT(contains(device_ptr), "not a sim device address");
    return const_cast<char*>(static_cast<const char*>(device_ptr)) + kSpan;
  }

 private:
  AddressSpace() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    void* base = mmap(nullptr, 2 * kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(base != MAP_FAILED, "sim: cannot reserve a device address space of ", kSpan, " bytes");
    base_ = static_cast<char*>(base);
  }

  size_t pages(size_t nbytes) const { return (nbytes + page_ - 1) / page_ * page_; }

  static constexpr size_t kSpan = size_t{1} << 40;
  size_t page_;
  char* base_;
  size_t next_ = 0;
};

}  // namespace simaccel
