// Rows of elements whose type is known only at run time, and memory that a thread keeps between calls.
#pragma once

#include <cstdlib>

#include "api.h"
#include "simd.h"

namespace {

// Threads for a loop over items: all of them, though some may find nothing to do, or only the calling one. With a number in
// between, libgomp would end the threads by which a team is smaller than the one before it, and start them anew for the next.
inline int team_size(int num_threads, int64_t num_items) { return num_items > 1 ? num_threads : 1; }

// Calls f with a value of the element's C++ type, for its type alone.
template <class Function>
inline void with_type(ElementType type, Function f) {
  if (type == kFloat32)
    f(float{});
  else if (type == kBfloat16)
    f(bf16{});
  else
    f(fp16{});
}

template <class From, class To>
inline void convert(const From* from, To* to, int64_t size) {
  for_each_vector(size, [=](int64_t i, int count) { store(to + i, load(from + i, count), count); });
}

template <class T>
inline void convert(const T* from, T* to, int64_t size) {
  memcpy(to, from, size * sizeof(T));
}

inline const void* at(const void* data, int64_t index, ElementType type) {
  return (const char*)data + index * (type == kFloat32 ? 4 : type == kInt8 ? 1 : 2);
}
inline void* at(void* data, int64_t index, ElementType type) { return (void*)at((const void*)data, index, type); }

template <class To>
inline void read_row(const void* from, ElementType type, To* to, int64_t size) {
  with_type(type, [=](auto element) { convert((const decltype(element)*)from, to, size); });
}
template <class From>
inline void write_row(const From* from, void* to, ElementType type, int64_t size) {
  with_type(type, [=](auto element) { convert(from, (decltype(element)*)to, size); });
}

// Scratch memory of one thread: grows to the largest request and is reused by later calls, so that a step touches no
// fresh pages.
class Scratch {
 public:
  ~Scratch() { free(memory_); }

  // At least `bytes`, aligned to a cache line; what an earlier call left there is lost.
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = aligned_alloc(64, size_);
      if (!memory_) abort();
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// Hands out aligned pieces of one scratch block: first add up the sizes, then take the pieces in the same order.
class Pieces {
 public:
  explicit Pieces(void* memory) : next_((char*)memory) {}
  template <class T>
  T* take(size_t count) {
    T* piece = (T*)next_;
    next_ += bytes<T>(count);
    return piece;
  }
  template <class T>
  static size_t bytes(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char* next_;
};

}  // namespace
