// Rows of elements whose type is known only at run time.
#pragma once

#include "api.h"
#include "simd.h"

namespace {

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

}  // namespace
