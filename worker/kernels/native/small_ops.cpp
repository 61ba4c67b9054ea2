// What stands between the matrix products of a Llama layer, each in one pass over its rows: RMS norm with the residual's
// addition, rotary embedding with the write of keys and values into their slots, SiLU(gate) * up.
//
// Letters as in worker/kernels/__init__.py; F and E are widths of rows. Activations are float32 or bfloat16.
//
// Invariants:
//   - All arithmetic is float32; what is stored is rounded once, to the type that it is stored as.
//   - No sum crosses rows, and an element's place in its row alone decides how it is computed: neither company nor the
//     number of threads changes a bit.
//   - Every position and every slot is checked before the first of them is followed; a call that is refused wrote nothing.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "call.h"
#include "vectors.h"

namespace octavo {

// The elements of a row, a vector at a time: body(i, count) with a constant kWidth, and once with what is left.
template <typename Body>
inline void for_vectors(int elements, const Body& body) {
  int i = 0;
  for (; i + kWidth <= elements; i += kWidth) body(i, std::integral_constant<int, kWidth>{});
  if (i < elements) body(i, elements - i);
}

template <typename T>
inline Floats load(const T* from, std::integral_constant<int, kWidth>) {
  return load(from);
}

template <typename T>
inline Floats load(const T* from, int count) {
  T padded[kWidth] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store(T* to, Floats x, std::integral_constant<int, kWidth>) {
  store(to, x);
}

template <typename T>
inline void store(T* to, Floats x, int count) {
  T padded[kWidth];
  store(padded, x);
  std::memcpy(to, padded, count * sizeof(T));
}

// Runs body(row) for every row. A thread takes rows of about kShare elements at a time: what is less than that is done
// before another thread would have woken up.
constexpr int kShare = 16384;

template <typename Body>
void for_rows(const Threads& threads, int rows, int elements, const Body& body) {
  const int share = std::max(1, kShare / std::max(1, elements));
  for_each(threads, (rows + share - 1) / share, [&](int i, int) {
    for (int row = i * share; row < std::min(rows, (i + 1) * share); row++) body(row);
  });
}

// The arguments of the exported functions, in step with native_small_ops.py. Strides in elements.
struct Norm {
  const void* x;   // [T, H, E]
  void* residual;  // [T, H, E], or null; becomes the sum
  const void* weight;
  void* out;  // [T, H, E], contiguous
  int64_t x_strides[2], residual_strides[2];
  Parallel parallel;
  int32_t tokens, heads, elements, is_bfloat16, threads;
  float eps;
};

struct Rope {
  // What changes from layer to layer comes first: the rest is filled once a step.
  const void* packed;                // [T, Hq + 2 Hkv, D], contiguous: queries, keys and values
  void* out;                         // [T, Hq, D], contiguous
  void *k_pool, *v_pool;             // [N, Hkv, S, D], of the same strides
  const void *q_norm, *k_norm;       // [D], or null
  float eps;                         // of the norms
  const float *cos, *sin;            // [P, D]
  const int64_t *positions, *slots;  // [T]
  Parallel parallel;
  int64_t pool_strides[3];  // block, head, slot
  int64_t cos_stride, sin_stride;
  int64_t table_positions, pool_slots;
  int32_t tokens, heads, kv_heads, dim, block_size, is_bfloat16, kv_type, threads;
};

struct Gated {
  const void *gate, *up;  // [T, F]
  void* out;              // [T, F], contiguous
  int64_t gate_stride, up_stride;
  Parallel parallel;
  int32_t tokens, elements, is_bfloat16, threads;
};

// What a row is multiplied with, beside its weight, to be normed: one over the root of its mean square.
template <typename X>
inline float norm_factor(const X* x, int elements, float eps) {
  Floats squares{};
  for_vectors(elements, [&](int i, auto n) {
    const Floats part = load(x + i, n);
    squares += part * part;
  });
  return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(elements) + eps);
}

template <typename X>
void normalise(const Norm& a) {
  const X* weight = static_cast<const X*>(a.weight);
  for_rows({a.parallel, a.threads}, a.tokens * a.heads, a.elements, [&](int row) {
    const int64_t token = row / a.heads, head = row % a.heads;
    const X* x = static_cast<const X*>(a.x) + token * a.x_strides[0] + head * a.x_strides[1];
    if (a.residual) {
      X* sum = static_cast<X*>(a.residual) + token * a.residual_strides[0] + head * a.residual_strides[1];
      for_vectors(a.elements, [&](int i, auto n) { store(sum + i, load(sum + i, n) + load(x + i, n), n); });
      x = sum;  // as it was rounded: the norm is that of the residual which the next layer gets
    }
    const float factor = norm_factor(x, a.elements, a.eps);
    X* out = static_cast<X*>(a.out) + static_cast<int64_t>(row) * a.elements;
    for_vectors(a.elements, [&](int i, auto n) { store(out + i, load(x + i, n) * factor * load(weight + i, n), n); });
  });
}

// The angles of one token, [D] each.
struct Angles {
  const float *cos, *sin;
};

// The second half of a head turns against the first, as in transformers' Llama. `head(i, count)` gives its elements.
template <typename Head, typename To>
inline void rotate(const Head& head, Angles angles, int dim, To* to) {
  const int half = dim / 2;
  for_vectors(half, [&](int i, auto n) {
    const int j = half + i;
    const Floats a = head(i, n), b = head(j, n);
    store(to + i, a * load(angles.cos + i, n) - b * load(angles.sin + i, n), n);
    store(to + j, b * load(angles.cos + j, n) + a * load(angles.sin + j, n), n);
  });
}

// Rotates a head x [D], normed first where there is a weight.
template <typename X, typename To>
inline void turn(const X* x, const void* weight, float eps, Angles angles, int dim, To* to) {
  if (weight == nullptr) {
    rotate([&](int i, auto n) { return load(x + i, n); }, angles, dim, to);
    return;
  }
  const float factor = norm_factor(x, dim, eps);
  const X* weights = static_cast<const X*>(weight);
  rotate([&](int i, auto n) { return load(x + i, n) * factor * load(weights + i, n); }, angles, dim, to);
}

template <typename X, typename KV>
void rope_and_write(const Rope& a) {
  const int row = (a.heads + 2 * a.kv_heads) * a.dim;
  for_rows({a.parallel, a.threads}, a.tokens, row, [&](int token) {
    const int64_t position = a.positions[token];
    const Angles angles = {a.cos + position * a.cos_stride, a.sin + position * a.sin_stride};
    const X* q = static_cast<const X*>(a.packed) + static_cast<int64_t>(token) * row;
    const X* k = q + a.heads * a.dim;
    const X* v = k + a.kv_heads * a.dim;
    X* out = static_cast<X*>(a.out) + static_cast<int64_t>(token) * a.heads * a.dim;
    const int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
    const int64_t place = block * a.pool_strides[0] + offset * a.pool_strides[2];
    for (int at = 0; at < a.heads * a.dim; at += a.dim) turn(q + at, a.q_norm, a.eps, angles, a.dim, out + at);
    for (int h = 0; h < a.kv_heads; h++) {
      KV* key = static_cast<KV*>(a.k_pool) + place + h * a.pool_strides[1];
      KV* value = static_cast<KV*>(a.v_pool) + place + h * a.pool_strides[1];
      turn(k + h * a.dim, a.k_norm, a.eps, angles, a.dim, key);
      for_vectors(a.dim, [&](int i, auto n) { store(value + i, load(v + h * a.dim + i, n), n); });
    }
  });
}

bool sound(const Rope& a) {
  for (int i = 0; i < a.tokens; i++) {
    if (a.positions[i] < 0 || a.positions[i] >= a.table_positions) return false;
    if (a.slots[i] < 0 || a.slots[i] >= a.pool_slots) return false;
  }
  return true;
}

template <typename X>
void rope_into(const Rope& a) {
  switch (a.kv_type) {
    case kBFloat16: return rope_and_write<X, BFloat16>(a);
    case kE4M3: return rope_and_write<X, E4M3>(a);
    case kE5M2: return rope_and_write<X, E5M2>(a);
    default: return rope_and_write<X, float>(a);
  }
}

// x / (1 + e^-x), by way of e^-|x|, which cannot overflow.
inline Floats silu(Floats x) {
  const Floats e = exp2_of((x < 0.0f ? x : -x) * kLog2E);
  return x * (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

template <typename X>
void gate_with(const Gated& a) {
  for_rows({a.parallel, a.threads}, a.tokens, a.elements, [&](int row) {
    const X* gate = static_cast<const X*>(a.gate) + row * a.gate_stride;
    const X* up = static_cast<const X*>(a.up) + row * a.up_stride;
    X* out = static_cast<X*>(a.out) + static_cast<int64_t>(row) * a.elements;
    for_vectors(a.elements, [&](int i, auto n) { store(out + i, silu(load(gate + i, n)) * load(up + i, n), n); });
  });
}

}  // namespace octavo

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

// Each returns 0, or 1 if it wrote nothing for what it was given is unsound.

OCTAVO_EXPORT int octavo_rms_norm(const octavo::Norm* a) {
  a->is_bfloat16 ? octavo::normalise<octavo::BFloat16>(*a) : octavo::normalise<float>(*a);
  return 0;
}

// Unsound: a position or a slot does not exist. D is even (the caller checks).
OCTAVO_EXPORT int octavo_rope_write(const octavo::Rope* a) {
  if (!octavo::sound(*a)) return 1;
  a->is_bfloat16 ? octavo::rope_into<octavo::BFloat16>(*a) : octavo::rope_into<float>(*a);
  return 0;
}

OCTAVO_EXPORT int octavo_silu_mul(const octavo::Gated* a) {
  a->is_bfloat16 ? octavo::gate_with<octavo::BFloat16>(*a) : octavo::gate_with<float>(*a);
  return 0;
}
