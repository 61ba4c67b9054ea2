// Vectors as wide as the target has them, in GCC's vector extensions (GCC and Clang): the same text serves AVX-512,
// AVX2, SSE2 and NEON.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace octavo {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kColumns = 4;  // vectors of a row that a loop keeps in registers: 4 rows x 4 columns, of 32
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kColumns = 2;  // of 16
#elif defined(__aarch64__)
constexpr int kWidth = 4;
constexpr int kColumns = 4;
#else
constexpr int kWidth = 4;
constexpr int kColumns = 2;
#endif

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));

// A bfloat16 is the upper half of a float32: the same exponent, 7 bits of fraction.
struct BFloat16 {
  uint16_t bits;
};

inline Floats splat(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const BFloat16* from) {
  Halves upper;
  std::memcpy(&upper, from, sizeof upper);
  const Words bits = __builtin_convertvector(upper, Words) << 16;
  Floats x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds to nearest, ties to even; a NaN stays one, which the rounding alone would not promise.
inline BFloat16 to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40)};
}

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
  const Floats t = x < low ? low : x;
  const Ints whole = __builtin_convertvector(t - 0.5f, Ints);  // truncation towards 0 rounds t <= 0 to nearest
  const Floats f = t - __builtin_convertvector(whole, Floats);
  Floats p = splat(1.326472571e-3f);  // a minimax fit of 2^f on [-1/2, 1/2]
  p = p * f + 9.67151309e-3f;
  p = p * f + 5.550733751e-2f;
  p = p * f + 2.402224208e-1f;
  p = p * f + 6.931469776e-1f;
  p = p * f + 1.0f;
  const Ints bits = (whole + 127) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return x < low ? Floats{} : p * power;
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
