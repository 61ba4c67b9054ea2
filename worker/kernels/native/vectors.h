// Vectors as wide as the target has them, in GCC's vector extensions (GCC and Clang): the same text serves AVX-512,
// AVX2, SSE2 and NEON. Instructions are named only where the compilers do not find them on their own.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace octavo {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// What a matrix product keeps in registers: kHeight rows of kColumns vectors, beside one row of each factor.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kHeight = 8, kColumns = 3;  // of 32 registers
#else
constexpr int kHeight = 4, kColumns = 2;  // of 16
#endif

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
typedef int16_t SignedHalves __attribute__((vector_size(kWidth * 2)));
typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
typedef int8_t SignedBytes __attribute__((vector_size(kWidth)));

// The stored types besides float. A bfloat16 is the upper half of a float32; a float8_e5m2 the upper half of a float16;
// a float8_e4m3fn has 4 bits of exponent, biased by 7, 3 of fraction, no infinity, and its NaN where all 7 are set.
struct BFloat16 {
  uint16_t bits;
};
struct E5M2 {
  uint8_t bits;
};
struct E4M3 {
  uint8_t bits;
};

inline Floats splat(float x) { return x - Floats{}; }

template <typename To, typename From>
inline To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

#if defined(__AVX512F__)
constexpr __mmask16 kAll = 0xFFFF;  // the intrinsics without a mask begin with a value that GCC warns of
#endif

inline Floats float16_to_floats(Halves x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtph_ps(kAll, (__m256i)x);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)x));
#else
  const Words bits = __builtin_convertvector(x, Words), size = (bits & 0x7FFF) << 13;
  const Words rebiased = size + (112u << 23);
  // Without a leading 1 the value is what the fraction adds to the power of two that it was put behind.
  const Floats subnormal = same_bits<Floats>(size + (113u << 23)) - same_bits<Floats>(Words{} + (113u << 23));
  const Words normal = size >= (0x7C00u << 13) ? rebiased + (112u << 23) : rebiased;
  const Words result = size < (0x0400u << 13) ? same_bits<Words>(subnormal) : normal;
  return same_bits<Floats>(result | (bits & 0x8000) << 16);
#endif
}

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const BFloat16* from) {
  Halves upper;
  std::memcpy(&upper, from, sizeof upper);
  return same_bits<Floats>(__builtin_convertvector(upper, Words) << 16);
}

inline Floats load(const E5M2* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return float16_to_floats(__builtin_convertvector(bytes, Halves) << 8);
}

inline Floats load(const E4M3* from) {
  SignedBytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  // Widened with its sign a byte has that twice, in the places of a float16's sign and of its highest exponent bit.
  const Halves bits = (Halves)(__builtin_convertvector(bytes, SignedHalves) << 7) & 0xBFFF;
  const Halves nan = (Halves)((bits & 0x3F80) == 0x3F80) & 0x4001;
  // A float16's exponent is biased by 15, not by 7: as one, the number is a 256th.
  return float16_to_floats(bits | nan) * 256.0f;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline float to_float(BFloat16 x) { return same_bits<float>(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to nearest, ties to even; a NaN stays one, which the rounding alone would not promise.
inline BFloat16 to_bfloat16(float x) {
  const uint32_t bits = same_bits<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40)};
}

inline void store(BFloat16* to, Floats x) {
  const Words bits = same_bits<Words>(x);
  const Words rounded = x == x ? bits + 0x7FFF + ((bits >> 16) & 1) : bits | 0x400000;
  const Halves upper = __builtin_convertvector(rounded >> 16, Halves);
  std::memcpy(to, &upper, sizeof upper);
}

// The nearest number of eight bits, ties to even, and the largest for what lies beyond; a NaN stays one.
template <int kFraction, int kBias>
inline void store_eight_bits(void* to, Floats x, float largest) {
  const Words bits = same_bits<Words>(x), sign = bits >> 24 & 0x80;
  const Floats size = same_bits<Floats>(bits & 0x7FFFFFFF);
  const Floats kept = size > largest ? splat(largest) : size;
  constexpr int kShift = 23 - kFraction;
  const Words wide = same_bits<Words>(kept) - (uint32_t{127 - kBias} << 23);
  const Words normal = (wide + (1u << (kShift - 1)) - 1 + (wide >> kShift & 1)) >> kShift;
  // Added to the power of two whose last place is the smallest subnormal, the sum rounds where it has to.
  const Words power = Words{} + (uint32_t{127 + 24 - kBias - kFraction} << 23);
  const Words subnormal = same_bits<Words>(kept + same_bits<Floats>(power)) - power;
  const Words least = Words{} + (uint32_t{128 - kBias} << 23);  // of those with a leading 1
  const Words rounded = kept < same_bits<Floats>(least) ? subnormal : normal;
  const Bytes bytes = __builtin_convertvector((x == x ? rounded : Words{} + 0x7F) | sign, Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
}

inline void store(E5M2* to, Floats x) { store_eight_bits<2, 15>(to, x, 57344.0f); }
inline void store(E4M3* to, Floats x) { store_eight_bits<3, 7>(to, x, 448.0f); }

template <int... kLane>
inline Floats pick(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, kLane...);
#else
  return __builtin_shuffle(a, b, Ints{kLane...});
#endif
}

// 2^x for x <= 0, relative error 1e-7; exactly 1 at 0 and exactly 0 below 2^-126. A NaN stays one.
inline Floats exp2_of(Floats x) {
  const Floats low = splat(-126.0f);
#if defined(__AVX512F__)
  const Floats whole = (Floats)_mm512_maskz_roundscale_ps(kAll, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
  const Floats f = x - whole;
#else
  const Floats t = x < low ? low : x;
  const Ints rounded = __builtin_convertvector(t - 0.5f, Ints);  // truncation towards 0 rounds t <= 0 to nearest
  const Floats f = t - __builtin_convertvector(rounded, Floats);
#endif
  Floats p = splat(1.326472571e-3f);  // a minimax fit of 2^f on [-1/2, 1/2]
  p = p * f + 9.67151309e-3f;
  p = p * f + 5.550733751e-2f;
  p = p * f + 2.402224208e-1f;
  p = p * f + 6.931469776e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)whole);
#else
  return x < low ? Floats{} : p * same_bits<Floats>((rounded + 127) << 23);
#endif
}

// cap * tanh(x / cap), which leaves small scores as they are and lets none pass the cap.
inline Floats capped(Floats x, float cap) {
  const Floats size = (x < 0.0f ? -x : x) * (1.0f / cap);
  const Floats e = exp2_of(size * -2.885390082f);  // e^(-2 size)
  const Floats bent = cap * (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -bent : bent;
}

inline Ints lane_numbers() {
  Ints lanes;
  for (int i = 0; i < kWidth; i++) lanes[i] = i;
  return lanes;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <int kDistance, int... kLane>
inline Floats swap_lanes(Floats x, std::integer_sequence<int, kLane...>) {
  return pick(x, x, std::integer_sequence<int, (kLane ^ kDistance)...>{});
}

// Every lane becomes the largest of all lanes.
template <int kDistance = kWidth / 2>
inline Floats largest_lane(Floats x) {
  if constexpr (kDistance == 0) {
    return x;
  } else {
    x = larger(x, swap_lanes<kDistance>(x, std::make_integer_sequence<int, kWidth>{}));
    return largest_lane<kDistance / 2>(x);
  }
}

// Lanes in runs of kRun, by turns sums of pairs of runs of `a` and of `b`.
template <int kRun, int... kLane>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
  constexpr auto source = [](int lane) {
    return lane / (2 * kRun) * (2 * kRun) + lane % kRun + (lane / kRun % 2 ? kWidth : 0);
  };
  return pick(a, b, std::integer_sequence<int, source(kLane)...>{}) +
         pick(a, b, std::integer_sequence<int, (source(kLane) + kRun)...>{});
}

// Lane i of the result is the sum of the lanes of rows[i]: kWidth sums in a tree of kWidth - 1 folds. Destroys `rows`.
template <int kRun = kWidth / 2>
inline Floats sum_each(Floats* rows) {
  if constexpr (kRun == 0) {
    return rows[0];
  } else {
    constexpr auto kEvery = std::make_integer_sequence<int, kWidth>{};
    for (int i = 0; i < kRun; i++) rows[i] = fold<kRun>(rows[i], rows[i + kRun], kEvery);
    return sum_each<kRun / 2>(rows);
  }
}

inline float sum_lanes(Floats x) {
  float lanes[kWidth], sum = 0;
  store(lanes, x);
  for (float lane : lanes) sum += lane;
  return sum;
}

}  // namespace octavo
