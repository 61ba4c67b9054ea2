// Paged attention on a CPU: decodes and prefill chunks of one ragged batch, read through the block table.
//
// Letters as in worker/kernels/__init__.py: q and out [T, Hq, D], k_pool and v_pool [N, Hkv, S, D], a group of
// G = Hq / Hkv query heads reads each KV head. Two loops, since the two kinds of work are bound by different things:
//
//   decode   one query of a sequence, G rows. Bound by memory: K and V come straight from the pool, once, while the
//            next rows are prefetched. A vector holds neighbouring elements of a head.
//   chunk    several queries of a sequence. Bound by arithmetic: a tile of up to 64 rows (query, head) lies across
//            the vector lanes, 64 positions of K and V at a time are copied out of their blocks, and all that is left
//            are two small matrix products with a softmax between them that never crosses a lane.
//
// Invariants:
//   - What a row becomes depends on its own sequence alone. Work is cut at fixed positions (kSpan, kPanel), partial
//     results are merged in the order of positions, and no sum crosses rows: neither company in the batch nor the
//     number of threads changes a bit.
//   - A slot at or past a sequence's length is never read, so whatever an unwritten slot holds cannot leak.
//   - Nothing is read before the whole batch was checked: a table entry that points outside the pool is refused.
//
// Plain C++17 with GCC's vector extensions (GCC and Clang): the width follows from what the compiler targets, so the
// same text serves AVX-512, AVX2, SSE2 and NEON. Threads are the caller's (see Threads below).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace {

// ---- vectors -------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kColumns = 4;  // vectors of a row that a loop keeps in registers: 4 rows x 4 fill half of 32
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kColumns = 2;  // 16 registers
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

// A bfloat16 is the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

constexpr float kNothing = -INFINITY;  // the score of a position that is not visible

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

// ---- across the lanes of a vector ----------------------------------------------------------------------------------

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
    for (int i = 0; i < kRun; i++) rows[i] = fold<kRun>(rows[i], rows[i + kRun], std::make_integer_sequence<int, kWidth>{});
    return sum_each<kRun / 2>(rows);
  }
}

inline float sum_lanes(Floats x) {
  float lanes[kWidth], sum = 0;
  store(lanes, x);
  for (float lane : lanes) sum += lane;
  return sum;
}

// ---- the call ------------------------------------------------------------------------------------------------------

template <typename T>
struct Pool {
  const T* data;
  int64_t block_stride, head_stride, slot_stride;  // in elements; the elements of a slot lie side by side

  const T* slot(int32_t block, int kv_head, int offset) const {
    return data + block * block_stride + kv_head * head_stride + offset * slot_stride;
  }
};

// GOMP_parallel of the OpenMP runtime that torch has loaded: runs `body(data)` on `threads` threads of that runtime's
// pool. Borrowing it means that no second pool of threads fights the first for the cores. Null: one thread.
using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

struct Threads {
  Parallel start;
  int count;
};

// Runs body(index, thread) for every index below `count`, in any order; `thread` numbers the threads from 0.
template <typename Body>
void for_each(const Threads& threads, int count, const Body& body) {
  struct Share {
    const Body& body;
    const int count;
    std::atomic<int> next_index{0}, next_thread{0};
  } share{body, count};
  const auto work = [](void* data) {
    Share& mine = *static_cast<Share*>(data);
    const int thread = mine.next_thread++;
    for (int i; (i = mine.next_index++) < mine.count;) mine.body(i, thread);
  };
  const int wanted = std::min(threads.count, count);
  if (wanted <= 1 || threads.start == nullptr) {
    work(&share);
  } else {
    threads.start(work, &share, static_cast<unsigned>(wanted), 0);
  }
}

// Memory of one call, kept by the calling thread for the next one. 64-byte lines: a vector never straddles two.
struct alignas(64) Line {
  float floats[16];
};

inline size_t lines(size_t floats) { return (floats + 15) / 16; }

// Queries and results: float32 or bfloat16. Told apart at run time, since only whole rows are ever read or written.
struct Rows {
  void* data;
  bool is_bfloat16;

  void read(int64_t at, int count, float factor, float* to, int step) const {
    if (is_bfloat16) {
      const BFloat16* from = static_cast<const BFloat16*>(data) + at;
      for (int i = 0; i < count; i++) to[i * step] = to_float(from[i]) * factor;
    } else {
      const float* from = static_cast<const float*>(data) + at;
      for (int i = 0; i < count; i++) to[i * step] = from[i] * factor;
    }
  }
  void write(int64_t at, int count, const float* from, int step, float divisor) const {
    if (is_bfloat16) {
      BFloat16* to = static_cast<BFloat16*>(data) + at;
      for (int i = 0; i < count; i++) to[i] = to_bfloat16(from[i * step] / divisor);
    } else {
      float* to = static_cast<float*>(data) + at;
      for (int i = 0; i < count; i++) to[i] = from[i * step] / divisor;
    }
  }
};

template <typename KV>
struct Call {
  Rows q;
  int64_t q_token_stride, q_head_stride;
  Pool<KV> k, v;
  const int32_t* tables;  // [B, M], rows `table_stride` apart
  int64_t table_stride;
  const int32_t* lengths;
  const int32_t* query_starts;
  Rows out;  // [T, Hq, D], contiguous
  int sequences, heads, kv_heads, dim, block_size;
  float scale;  // of the scores, in powers of two: what the caller gave, times log2(e)
  Threads threads;

  int group() const { return heads / kv_heads; }
  int queries(int b) const { return query_starts[b + 1] - query_starts[b]; }
  const int32_t* table(int b) const { return tables + b * table_stride; }

  // The rows of a sequence's KV head are (query, head of the group), heads fastest. Elements go `step` floats apart.
  void read_query(int b, int kv_head, int row, float* to, int step) const {
    const int64_t token = query_starts[b] + row / group(), head = kv_head * group() + row % group();
    q.read(token * q_token_stride + head * q_head_stride, dim, scale, to, step);
  }
  void write_result(int b, int kv_head, int row, const float* from, int step, float divisor) const {
    const int64_t token = query_starts[b] + row / group(), head = kv_head * group() + row % group();
    out.write((token * heads + head) * dim, dim, from, step, divisor);
  }
};

// ---- decode: rows of one query, straight from the pool ---------------------------------------------------------------

constexpr int kSpan = 256;  // positions that one piece of work takes; a fixed cut, see the invariants

// The running softmax of one row: kWidth sums that are added up at the end, and the largest score in every lane.
struct Row {
  Floats peak, total;
};

// Up to kWidth neighbouring positions of one block and KV head.
template <typename KV>
struct Tile {
  const KV *k, *v;
  int count;
};

template <typename KV>
inline Tile<KV> tile_at(const Call<KV>& call, const int32_t* table, int kv_head, int position, int end) {
  const int32_t block = table[position / call.block_size];
  const int offset = position % call.block_size;
  const int count = std::min({kWidth, call.block_size - offset, end - position});
  return {call.k.slot(block, kv_head, offset), call.v.slot(block, kv_head, offset), count};
}

template <typename KV>
inline void prefetch(const KV* row, int dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < dim * sizeof(KV); at += 64) __builtin_prefetch(bytes + at);
}

// The loops below are compiled once for a full tile, whose length the compiler then knows, and once for any other.
template <bool kFull, typename KV>
inline int positions_of(const Tile<KV>& tile) {
  return kFull ? kWidth : tile.count;
}

// Scores of kRows rows at the tile's positions, one position a lane. Asks for the next tile's K and V on the way: the
// memory is busy while the arithmetic runs.
template <int kRows, int kDim, bool kFull, typename KV>
inline void score(const Call<KV>& call, const float* q, const Tile<KV>& tile, const Tile<KV>& next, Floats* scores) {
  const int dim = kDim ? kDim : call.dim;
  Floats partial[kRows][kWidth];
  if (!kFull) std::memset(partial, 0, sizeof partial);
  for (int t = 0; t < positions_of<kFull>(tile); t++) {
    prefetch(next.k + t * call.k.slot_stride, dim);
    prefetch(next.v + t * call.v.slot_stride, dim);
    Floats sum[kRows] = {};
    for (int d = 0; d < dim; d += kWidth) {
      const Floats k = load(tile.k + t * call.k.slot_stride + d);
      for (int r = 0; r < kRows; r++) sum[r] += load(q + r * dim + d) * k;
    }
    for (int r = 0; r < kRows; r++) partial[r][t] = sum[r];
  }
  for (int r = 0; r < kRows; r++) scores[r] = sum_each(partial[r]);
}

// kCols vectors of kRows rows of out[r] = fade[r] * out[r] + sum over the tile of weight * V; `v` and `out` begin there.
template <int kRows, int kCols, typename KV>
inline void accumulate(const float (*weights)[kWidth], const Floats* fade, const KV* v, int64_t slot_stride, int count,
                       float* out, int dim) {
  Floats sum[kRows][kCols];
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kCols; c++) sum[r][c] = load(out + r * dim + c * kWidth) * fade[r];
  for (int t = 0; t < count; t++) {
    for (int c = 0; c < kCols; c++) {
      const Floats value = load(v + t * slot_stride + c * kWidth);
      for (int r = 0; r < kRows; r++) sum[r][c] += weights[r][t] * value;
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kCols; c++) store(out + r * dim + c * kWidth, sum[r][c]);
}

// One tile of online softmax for kRows rows; `q`, `rows` and `out` begin at the first of them.
template <int kRows, int kDim, bool kFull, typename KV>
inline void decode_rows(const Call<KV>& call, const float* q, const Tile<KV>& tile, const Tile<KV>& next, Row* rows,
                        float* out) {
  const int dim = kDim ? kDim : call.dim, count = positions_of<kFull>(tile);
  Floats scores[kRows], fade[kRows];
  float weights[kRows][kWidth];
  score<kRows, kDim, kFull>(call, q, tile, next, scores);
  for (int r = 0; r < kRows; r++) {
    if (!kFull) scores[r] = lane_numbers() < count ? scores[r] : splat(kNothing);
    const Floats peak = larger(largest_lane(scores[r]), rows[r].peak);
    const Floats weight = exp2_of(scores[r] - peak);
    fade[r] = exp2_of(rows[r].peak - peak);
    rows[r] = {peak, rows[r].total * fade[r] + weight};
    store(weights[r], weight);
  }
  int d = 0;
  for (; d + kColumns * kWidth <= dim; d += kColumns * kWidth)
    accumulate<kRows, kColumns>(weights, fade, tile.v + d, call.v.slot_stride, count, out + d, dim);
  for (; d < dim; d += kWidth)
    accumulate<kRows, 1>(weights, fade, tile.v + d, call.v.slot_stride, count, out + d, dim);
}

// One tile for all rows of the group.
template <int kDim, bool kFull, typename KV>
inline void decode_tile(const Call<KV>& call, const float* q, const Tile<KV>& tile, const Tile<KV>& next, Row* rows,
                        float* out) {
  const int dim = kDim ? kDim : call.dim;
  for (int left = call.group(); left > 0; left -= 4, q += 4 * dim, rows += 4, out += 4 * dim) {
    switch (left) {
      case 1: decode_rows<1, kDim, kFull>(call, q, tile, next, rows, out); break;
      case 2: decode_rows<2, kDim, kFull>(call, q, tile, next, rows, out); break;
      case 3: decode_rows<3, kDim, kFull>(call, q, tile, next, rows, out); break;
      default: decode_rows<4, kDim, kFull>(call, q, tile, next, rows, out);
    }
  }
}

// What a span of positions came to, for the G rows of one KV head: merged with the other spans afterwards.
struct Span {
  int sequence, kv_head, begin, end;
};

struct Partial {
  float *peak, *total;  // [G]
  float* out;           // [G, D], not yet divided by the total
};

template <int kDim, typename KV>
void decode(const Call<KV>& call, const Span& span, const Partial& partial, Line* scratch) {
  const int group = call.group(), dim = kDim ? kDim : call.dim;
  float* q = scratch->floats;
  for (int r = 0; r < group; r++) call.read_query(span.sequence, span.kv_head, r, q + r * dim, 1);
  Row* rows = reinterpret_cast<Row*>(scratch + lines(static_cast<size_t>(group) * dim));
  for (int r = 0; r < group; r++) rows[r] = {splat(kNothing), Floats{}};
  std::fill_n(partial.out, static_cast<size_t>(group) * dim, 0.0f);

  const int32_t* table = call.table(span.sequence);
  Tile<KV> tile = tile_at(call, table, span.kv_head, span.begin, span.end), next;
  for (int position = span.begin; position < span.end; tile = next) {
    position += tile.count;
    next = position < span.end ? tile_at(call, table, span.kv_head, position, span.end) : tile;
    if (tile.count == kWidth) {
      decode_tile<kDim, true>(call, q, tile, next, rows, partial.out);
    } else {
      decode_tile<kDim, false>(call, q, tile, next, rows, partial.out);
    }
  }
  for (int r = 0; r < group; r++) {
    partial.peak[r] = rows[r].peak[0];
    partial.total[r] = sum_lanes(rows[r].total);
  }
}

// Joins the spans of one sequence's KV head, in the order of positions.
template <typename KV>
void merge(const Call<KV>& call, const Span* spans, const Partial* partials, int count, Line* scratch) {
  const int dim = call.dim;
  float* sum = scratch->floats;
  for (int r = 0; r < call.group(); r++) {
    float peak = kNothing, total = 0;
    for (int i = 0; i < count; i++) peak = std::max(peak, partials[i].peak[r]);
    std::fill_n(sum, dim, 0.0f);
    for (int i = 0; i < count; i++) {
      const float weight = std::exp2(partials[i].peak[r] - peak);
      total += weight * partials[i].total[r];
      for (int d = 0; d < dim; d++) sum[d] += weight * partials[i].out[r * dim + d];
    }
    call.write_result(spans->sequence, spans->kv_head, r, sum, 1, total);
  }
}

// ---- chunk: many rows, one a lane ----------------------------------------------------------------------------------

constexpr int kLanes = 64;  // rows of a tile
constexpr int kPanel = 64;  // positions that are copied out of the pool at a time; a fixed cut, see the invariants

// Rows [first_row, first_row + kLanes) of a sequence's KV head, fewer at its end.
struct Chunk {
  int sequence, kv_head, first_row;
};

// Four rows and kCols vectors of out[m][lane] += sum over k < depth of a[m * a_row + k * a_step] * b[k][lane].
template <int kCols>
inline void add_product_tile(const float* a, int64_t a_row, int64_t a_step, const float* b, float* out, int depth) {
  Floats sum[4][kCols];
  for (int m = 0; m < 4; m++)
    for (int c = 0; c < kCols; c++) sum[m][c] = load(out + m * kLanes + c * kWidth);
  for (int k = 0; k < depth; k++) {
    Floats column[kCols];
    for (int c = 0; c < kCols; c++) column[c] = load(b + k * kLanes + c * kWidth);
    for (int m = 0; m < 4; m++) {
      const float factor = a[m * a_row + k * a_step];
      for (int c = 0; c < kCols; c++) sum[m][c] += factor * column[c];
    }
  }
  for (int m = 0; m < 4; m++)
    for (int c = 0; c < kCols; c++) store(out + m * kLanes + c * kWidth, sum[m][c]);
}

// The same for `height` rows (a multiple of 4) and the first `lanes` lanes (a multiple of kWidth).
void add_product(const float* a, int64_t a_row, int64_t a_step, const float* b, float* out, int height, int lanes,
                 int depth) {
  for (int m = 0; m < height; m += 4) {
    const float* rows = a + m * a_row;
    int lane = 0;
    for (; lane + kColumns * kWidth <= lanes; lane += kColumns * kWidth)
      add_product_tile<kColumns>(rows, a_row, a_step, b + lane, out + m * kLanes + lane, depth);
    for (; lane < lanes; lane += kWidth)
      add_product_tile<1>(rows, a_row, a_step, b + lane, out + m * kLanes + lane, depth);
  }
}

// Where a chunk keeps its numbers: everything that meets a row is laid out [.., kLanes].
struct Bench {
  float *q, *out;            // [D, kLanes]
  float *k, *v;              // [kPanel, D]
  float *scores;             // [kPanel, kLanes]
  float *peak, *total;       // [kLanes]
  int32_t* visible;          // [kLanes]: a row sees positions below this

  static size_t floats(int dim) { return static_cast<size_t>(dim) * (2 * kLanes + 2 * kPanel) + (kPanel + 3) * kLanes; }

  Bench(Line* scratch, int dim) {
    q = scratch->floats;
    out = q + dim * kLanes;
    k = out + dim * kLanes;
    v = k + dim * kPanel;
    scores = v + dim * kPanel;
    peak = scores + kPanel * kLanes;
    total = peak + kLanes;
    visible = reinterpret_cast<int32_t*>(total + kLanes);
  }
};

// Copies positions [begin, begin + count) of one KV head out of their blocks.
template <typename KV>
void gather(const Call<KV>& call, const Chunk& chunk, int begin, int count, const Bench& bench) {
  const int dim = call.dim;
  const int32_t* table = call.table(chunk.sequence);
  for (int i = 0; i < count;) {
    const Tile<KV> tile = tile_at(call, table, chunk.kv_head, begin + i, begin + count);
    for (int t = 0; t < tile.count; t++, i++) {
      for (int d = 0; d < dim; d += kWidth) {
        store(bench.k + i * dim + d, load(tile.k + t * call.k.slot_stride + d));
        store(bench.v + i * dim + d, load(tile.v + t * call.v.slot_stride + d));
      }
    }
  }
}

// Turns the scores of positions [begin, begin + count) into weights, and fades what was summed before to the new peak.
void soften(const Bench& bench, int begin, int count, int lanes, int dim) {
  for (int lane = 0; lane < lanes; lane += kWidth) {
    Ints visible;
    std::memcpy(&visible, bench.visible + lane, sizeof visible);
    const Floats before = load(bench.peak + lane);
    Floats peak = before;
    for (int t = 0; t < count; t++) {
      float* at = bench.scores + t * kLanes + lane;
      const Floats score = begin + t < visible ? load(at) : splat(kNothing);
      peak = larger(score, peak);
      store(at, score);
    }
    const Floats fade = exp2_of(before - peak);
    Floats total = load(bench.total + lane) * fade;
    for (int t = 0; t < count; t++) {
      float* at = bench.scores + t * kLanes + lane;
      const Floats weight = exp2_of(load(at) - peak);
      total += weight;
      store(at, weight);
    }
    store(bench.peak + lane, peak);
    store(bench.total + lane, total);
    for (int d = 0; d < dim; d++) {
      float* at = bench.out + d * kLanes + lane;
      store(at, load(at) * fade);
    }
  }
}

template <typename KV>
void attend_chunk(const Call<KV>& call, const Chunk& chunk, Line* scratch) {
  const int dim = call.dim, group = call.group(), queries = call.queries(chunk.sequence);
  const int rows = std::min(kLanes, queries * group - chunk.first_row);
  const int lanes = (rows + kWidth - 1) / kWidth * kWidth;
  const int history = call.lengths[chunk.sequence] - queries;
  const Bench bench(scratch, dim);
  for (int lane = 0; lane < lanes; lane++) {
    const int row = chunk.first_row + std::min(lane, rows - 1);  // lanes left over repeat the last row, unread
    call.read_query(chunk.sequence, chunk.kv_head, row, bench.q + lane, kLanes);
    bench.visible[lane] = history + row / group + 1;
    bench.peak[lane] = kNothing;
    bench.total[lane] = 0.0f;
  }
  std::fill_n(bench.out, static_cast<size_t>(dim) * kLanes, 0.0f);

  const int end = bench.visible[rows - 1];
  for (int begin = 0; begin < end; begin += kPanel) {
    const int count = std::min(kPanel, end - begin);
    gather(call, chunk, begin, count, bench);
    std::fill_n(bench.scores, kPanel * kLanes, 0.0f);
    // Rounded up to whole tiles: what the last rows of the panel hold gives scores that nobody reads.
    add_product(bench.k, dim, 1, bench.q, bench.scores, (count + 3) / 4 * 4, lanes, dim);
    soften(bench, begin, count, lanes, dim);
    add_product(bench.v, 1, dim, bench.scores, bench.out, dim, lanes, count);
  }
  for (int lane = 0; lane < rows; lane++) {
    call.write_result(chunk.sequence, chunk.kv_head, chunk.first_row + lane, bench.out + lane, kLanes, bench.total[lane]);
  }
}

// ---- one batch -----------------------------------------------------------------------------------------------------

// Everything that a pointer is made of, before any of it is followed.
template <typename KV>
bool sound(const Call<KV>& call, int tokens, int num_blocks, int table_width) {
  if (call.query_starts[0] != 0 || call.query_starts[call.sequences] != tokens) return false;
  for (int b = 0; b < call.sequences; b++) {
    const int length = call.lengths[b];
    if (call.queries(b) < 1 || call.query_starts[b + 1] > tokens || length < call.queries(b)) return false;
    const int blocks = (length - 1) / call.block_size + 1;
    if (blocks > table_width) return false;
    for (int i = 0; i < blocks; i++) {
      if (call.table(b)[i] < 0 || call.table(b)[i] >= num_blocks) return false;
    }
  }
  return true;
}

struct Work {
  std::vector<Chunk> chunks;
  std::vector<Span> spans;
  std::vector<int> first_span;  // of each (sequence, KV head) that decodes, and the number of spans at the end
};

template <typename KV>
Work plan(const Call<KV>& call) {
  Work work;
  for (int b = 0; b < call.sequences; b++) {
    for (int h = 0; h < call.kv_heads; h++) {
      if (call.queries(b) == 1) {
        work.first_span.push_back(static_cast<int>(work.spans.size()));
        for (int begin = 0; begin < call.lengths[b]; begin += kSpan)
          work.spans.push_back({b, h, begin, std::min(begin + kSpan, call.lengths[b])});
      } else {
        // The last rows see the most positions: they go first, so that the threads end together.
        const int rows = call.queries(b) * call.group();
        for (int row = (rows - 1) / kLanes * kLanes; row >= 0; row -= kLanes) work.chunks.push_back({b, h, row});
      }
    }
  }
  work.first_span.push_back(static_cast<int>(work.spans.size()));
  return work;
}

template <int kDim, typename KV>
void attend(const Call<KV>& call) {
  const Work work = plan(call);
  const size_t group = call.group(), dim = call.dim;
  const size_t partial_lines = 2 * lines(group) + lines(group * dim);
  const size_t decode_lines = lines(group * dim) + lines(group * sizeof(Row) / sizeof(float));
  const size_t thread_lines = std::max(decode_lines, work.chunks.empty() ? 0 : lines(Bench::floats(call.dim)));
  static thread_local std::vector<Line> memory;
  const size_t wanted = partial_lines * work.spans.size() + thread_lines * call.threads.count;
  if (memory.size() < wanted) memory.resize(wanted);
  Line* const scratch = memory.data() + partial_lines * work.spans.size();

  std::vector<Partial> partials(work.spans.size());
  for (size_t i = 0; i < partials.size(); i++) {
    Line* at = memory.data() + partial_lines * i;
    partials[i] = {at->floats, at[lines(group)].floats, at[2 * lines(group)].floats};
  }
  const int chunks = static_cast<int>(work.chunks.size()), spans = static_cast<int>(work.spans.size());
  for_each(call.threads, chunks + spans, [&](int i, int thread) {
    Line* mine = scratch + thread * thread_lines;
    if (i < chunks) {
      attend_chunk(call, work.chunks[i], mine);
    } else {
      decode<kDim>(call, work.spans[i - chunks], partials[i - chunks], mine);
    }
  });
  for_each(call.threads, static_cast<int>(work.first_span.size()) - 1, [&](int i, int thread) {
    const int first = work.first_span[i], count = work.first_span[i + 1] - first;
    merge(call, &work.spans[first], &partials[first], count, scratch + thread * thread_lines);
  });
}

}  // namespace

// ---- the way in ----------------------------------------------------------------------------------------------------

// Kept in step with `_Arguments` in native.py. Strides in elements.
struct OctavoAttention {
  void* q;  // read only
  const void *k_pool, *v_pool;
  const int32_t *tables, *lengths, *query_starts;
  void* out;
  int64_t q_strides[2];       // token, head
  int64_t k_strides[3];       // block, head, slot
  int64_t v_strides[3];
  int64_t table_stride;
  int32_t tokens, sequences, table_width, heads, kv_heads, dim, block_size, num_blocks;
  int32_t q_is_bfloat16, kv_is_bfloat16;
  int32_t threads;
  float scale;
  Parallel parallel;
};

enum Outcome : int { kDone = 0, kUnsoundBatch = 1, kOutOfMemory = 2 };

template <typename KV>
static Outcome attend_as(const OctavoAttention& a) {
  constexpr float kLog2E = 1.44269504f;
  const Call<KV> call{
      {a.q, a.q_is_bfloat16 != 0}, a.q_strides[0], a.q_strides[1],
      {static_cast<const KV*>(a.k_pool), a.k_strides[0], a.k_strides[1], a.k_strides[2]},
      {static_cast<const KV*>(a.v_pool), a.v_strides[0], a.v_strides[1], a.v_strides[2]},
      a.tables, a.table_stride, a.lengths, a.query_starts, {a.out, a.q_is_bfloat16 != 0},
      a.sequences, a.heads, a.kv_heads, a.dim, a.block_size, a.scale * kLog2E,
      {a.parallel, std::max(1, a.threads)}};
  if (!sound(call, a.tokens, a.num_blocks, a.table_width)) return kUnsoundBatch;
  switch (a.dim) {  // a head size known to the compiler is worth a third of the decode time
    case 64: attend<64>(call); break;
    case 128: attend<128>(call); break;
    default: attend<0>(call);
  }
  return kDone;
}

// Head sizes: multiples of 16 (the caller checks). Returns an Outcome; nothing was written unless it is kDone.
extern "C" int octavo_paged_attention(const OctavoAttention* arguments) {
  try {
    return arguments->kv_is_bfloat16 ? attend_as<BFloat16>(*arguments) : attend_as<float>(*arguments);
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
