// Vectors of floats for one instruction set: with panels.h and tiles.h the only file that knows
// which one it is.
//
// Every variant compiles the same kernels with other compiler flags and another width. All functions have internal
// linkage (an unnamed namespace, no templates of the standard library), so that code made for one instruction set can
// never be merged by the linker into a variant that runs on a lesser machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * kWidth)));
typedef int32_t IntVector __attribute__((vector_size(4 * kWidth)));
typedef uint32_t UIntVector __attribute__((vector_size(4 * kWidth)));
typedef uint16_t HalfVector __attribute__((vector_size(2 * kWidth)));

constexpr float kInfinity = __builtin_inff();

template <class T>
inline T smaller(T a, T b) {
  return a < b ? a : b;
}
template <class T>
inline T larger(T a, T b) {
  return a > b ? a : b;
}
template <class T>
inline T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

inline Vector broadcast(float value) { return value - Vector{}; }

// a * b + c, rounded once where the machine can.
inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The larger; b where one of them is NaN.
inline Vector maximum(Vector a, Vector b) {
#if defined(__AVX512F__)
  return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline IntVector maximum(IntVector a, IntVector b) { return a > b ? a : b; }

// Over all lanes, in the same order on every machine of a variant.
inline float horizontal_sum(Vector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
#endif
}
inline float horizontal_maximum(Vector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) v[i] = larger(v[i], v[i + half]);
  return v[0];
#endif
}
inline int32_t horizontal_sum(IntVector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < kWidth; i++) sum += v[i];
  return sum;
#endif
}
inline int32_t horizontal_maximum(IntVector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t most = v[0];
  for (int i = 1; i < kWidth; i++) most = larger(most, v[i]);
  return most;
#endif
}

// Of each two lanes whose numbers differ by `Distance`, a power of 2: their sum in the lower, the lower minus the other above.
template <int Distance>
inline Vector add_or_subtract_partners(Vector v) {
  Vector partners, signs;
  for (int i = 0; i < kWidth; i++) signs[i] = i & Distance ? -1.0f : 1.0f;
#if defined(__AVX512F__)
  if constexpr (Distance == 8)
    partners = (Vector)_mm512_shuffle_f32x4((__m512)v, (__m512)v, _MM_SHUFFLE(1, 0, 3, 2));
  else if constexpr (Distance == 4)
    partners = (Vector)_mm512_shuffle_f32x4((__m512)v, (__m512)v, _MM_SHUFFLE(2, 3, 0, 1));
  else
    partners = (Vector)_mm512_permute_ps((__m512)v, Distance == 2 ? _MM_SHUFFLE(1, 0, 3, 2) : _MM_SHUFFLE(2, 3, 0, 1));
#elif defined(__AVX2__)
  if constexpr (Distance == 4)
    partners = (Vector)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
  else
    partners = (Vector)_mm256_permute_ps((__m256)v, Distance == 2 ? _MM_SHUFFLE(1, 0, 3, 2) : _MM_SHUFFLE(2, 3, 0, 1));
#else
  for (int i = 0; i < kWidth; i++) partners[i] = v[i ^ Distance];
#endif
  return multiply_add(signs, v, partners);
}

// ---- Loads and stores of kWidth elements; conversions to and from 16 bits round to nearest even.

inline Vector load(const float* p) {
  Vector v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vector v) { memcpy(p, &v, sizeof v); }

inline Vector load(const bf16* p) {
#if defined(__AVX512F__)
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  HalfVector half;
  memcpy(&half, p, sizeof half);
  return (Vector)(__builtin_convertvector(half, UIntVector) << 16);
#endif
}

inline void store(bf16* p, Vector v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  const UIntVector bits = (UIntVector)v;
  UIntVector rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = v == v ? rounded : (bits >> 16) | 0x40;
  const HalfVector half = __builtin_convertvector(rounded, HalfVector);
  memcpy(p, &half, sizeof half);
#endif
}

inline Vector load(const fp16* p) {
#if defined(__AVX512F__)
  return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  HalfVector half;
  memcpy(&half, p, sizeof half);
  const UIntVector bits = __builtin_convertvector(half, UIntVector);
  // The half's exponent and mantissa read as a float are 2^112 too small, subnormals included.
  UIntVector magnitude = (UIntVector)((Vector)((bits & 0x7fff) << 13) * 0x1p112f);
  magnitude = (bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000u : magnitude;
  return (Vector)(magnitude | (bits & 0x8000) << 16);
#endif
}

inline void store(fp16* p, Vector v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const UIntVector bits = (UIntVector)v;
  const UIntVector magnitude = bits & 0x7fffffff;
  const UIntVector normal = (magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 makes the float adder round a value below 2^-14 to a multiple of 2^-24, a subnormal half's unit.
  const UIntVector subnormal = (UIntVector)((Vector)magnitude + 0.5f) - 0x3f000000u;
  UIntVector half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? UIntVector{} + 0x7c00 : half;
  half = v == v ? half : UIntVector{} + 0x7e00;
  const HalfVector packed = __builtin_convertvector(half | (bits >> 16 & 0x8000), HalfVector);
  memcpy(p, &packed, sizeof packed);
#endif
}

// The first `count` < kWidth elements; the lanes beyond read as zero and are not written.
template <class T>
inline Vector load_first(const T* p, int count) {
  T lanes[kWidth] = {};
  memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}
template <class T>
inline void store_first(T* p, Vector v, int count) {
  T lanes[kWidth];
  store(lanes, v);
  memcpy(p, lanes, count * sizeof(T));
}

// f(index, count) over the vectors of `size` elements; count is kWidth except perhaps for the last.
template <class Function>
inline void for_each_vector(int64_t size, Function f) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) f(i, kWidth);
  if (i < size) f(i, int(size - i));
}
template <class T>
inline Vector load(const T* p, int count) {
  return count == kWidth ? load(p) : load_first(p, count);
}
template <class T>
inline void store(T* p, Vector v, int count) {
  if (count == kWidth)
    store(p, v);
  else
    store_first(p, v, count);
}

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }
inline float to_float(fp16 x) { return load_first(&x, 1)[0]; }

// ---- Functions

// p * 2^n for p near 1 and whole n in [-150, 127]; results below the normal range may be 0.
inline Vector scale_by_power_of_2(Vector p, Vector n) {
#if defined(__AVX512F__)
  return (Vector)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Vector magic = broadcast(12582912.0f);
  const Vector scaled = (Vector)((IntVector)p + (((IntVector)(n + magic) - (IntVector)magic) << 23));
  return n < -125.0f ? Vector{} : scaled;
#endif
}

inline Vector round_to_integer(Vector x) {  // for |x| < 2^22
#if defined(__AVX512F__)
  return (Vector)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vector magic = broadcast(12582912.0f);  // 1.5 * 2^23 leaves no bits for a fraction
  return (x + magic) - magic;
#endif
}

inline IntVector nearest_integers(Vector x) {  // for |x| < 2^22
#if defined(__AVX512F__)
  return (IntVector)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (IntVector)_mm256_cvtps_epi32((__m256)x);
#else
  return __builtin_convertvector(round_to_integer(x), IntVector);
#endif
}

// The low bits of whole numbers.
inline void store(int8_t* p, IntVector whole) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)whole));
#else
  for (int i = 0; i < kWidth; i++) p[i] = int8_t(whole[i]);
#endif
}
inline void store(int16_t* p, IntVector whole) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)whole));
#else
  const HalfVector half = __builtin_convertvector(whole, HalfVector);
  memcpy(p, &half, sizeof half);
#endif
}

// 2^x for x <= 127 to about 1e-7 of the result for each unit of |x|; 0 for x below -126, NaN for NaN, and 2^0 is 1.
inline Vector power_of_2(Vector x) {
  const Vector bounded = maximum(broadcast(-150.0f), x);
  const Vector n = round_to_integer(bounded);
  const Vector r = bounded - n;
  // Minimax on [-0.5, 0.5]: relative error 9e-8.
  Vector p = broadcast(1.326472690e-3f);
  p = multiply_add(p, r, broadcast(9.671512661e-3f));
  p = multiply_add(p, r, broadcast(5.550733744e-2f));
  p = multiply_add(p, r, broadcast(2.402224208e-1f));
  p = multiply_add(p, r, broadcast(6.931469776e-1f));
  p = multiply_add(p, r, broadcast(1.0f));
  return scale_by_power_of_2(p, n);
}
inline float power_of_2(float x) { return power_of_2(broadcast(x))[0]; }

constexpr float kLog2E = 1.44269504088896341f;

// e^x with a relative error of about 1e-7; e^88 above 88, 0 below -104, NaN for NaN.
inline Vector exponential(Vector x) {
  const Vector bounded = maximum(broadcast(-104.0f), -maximum(broadcast(-88.0f), -x));
  const Vector n = round_to_integer(bounded * kLog2E);
  // ln(2) in two parts, so that the remainder is exact.
  Vector r = multiply_add(n, broadcast(-0.693359375f), bounded);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  // The polynomial of the Cephes library's expf.
  Vector p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  p = multiply_add(p, r * r, r) + 1.0f;
  return scale_by_power_of_2(p, n);
}

inline Vector hyperbolic_tangent(Vector x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

}  // namespace
