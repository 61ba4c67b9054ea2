// Paged attention on a CPU: decodes and prefill chunks of one ragged batch, read through the block table.
//
// Letters as in worker/kernels/__init__.py: q and out [T, Hq, D], k_pool and v_pool [N, Hkv, S, D]; a group of
// G = Hq / Hkv query heads reads each KV head. A sequence with one query is decoded (decode.h), one with several is a
// chunk (chunk.h): the two are bound by different things, memory and arithmetic.
//
// Invariants:
//   - What a row becomes depends on its own sequence alone. Work is cut at fixed positions (kSpan, kPanel), partial
//     results are merged in the order of positions, and no sum crosses rows: neither company in the batch nor the
//     number of threads changes a bit.
//   - A slot at or past a sequence's length is never used, so whatever an unwritten slot holds cannot leak.
//   - No block is read before the whole batch was checked: an entry that points outside the pool is refused.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "call.h"
#include "chunk.h"
#include "decode.h"

namespace octavo {

// Whether every position has its block, every block its pool, and every query its row; read before any is followed.
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
        const int owner = static_cast<int>(work.first_span.size()), end = call.lengths[b];
        work.first_span.push_back(static_cast<int>(work.spans.size()));
        for (int begin = call.first_visible(end - 1), cut; begin < end; begin = cut) {
          cut = std::min((begin / kSpan + 1) * kSpan, end);
          work.spans.push_back({b, h, begin, cut, owner});
        }
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
  const size_t thread_lines = std::max(decode_lines(call), work.chunks.empty() ? 0 : lines(Bench::floats(call.dim)));
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
  std::vector<std::atomic<int>> left(work.first_span.size() - 1);
  for (size_t i = 0; i < left.size(); i++) left[i] = work.first_span[i + 1] - work.first_span[i];
  for_each(call.threads, chunks + spans, [&](int i, int thread) {
    Line* mine = scratch + thread * thread_lines;
    if (i < chunks) return attend_chunk(call, work.chunks[i], mine);
    const Span& span = work.spans[i - chunks];
    decode<kDim>(call, span, partials[i - chunks], mine);
    if (--left[span.owner] > 0) return;
    const int first = work.first_span[span.owner];  // the last of its spans: whichever thread ends it merges them all
    merge(call, &work.spans[first], &partials[first], work.first_span[span.owner + 1] - first, mine);
  });
}

}  // namespace octavo

// The arguments of the one exported function, in step with `_ARGUMENTS` in native.py. Strides in elements.
struct OctavoAttention {
  // What changes from layer to layer comes first: the rest is filled once a step.
  void* q;  // only read
  const void *k_pool, *v_pool;
  void* out;
  const int32_t *tables, *lengths, *query_starts;
  int64_t q_strides[2];  // token, head
  int64_t k_strides[3];  // block, head, slot
  int64_t v_strides[3];
  int64_t table_stride;
  int32_t tokens, sequences, table_width, heads, kv_heads, dim, block_size, num_blocks;
  int32_t q_is_bfloat16, kv_type;  // an octavo::Type
  int32_t window;                  // 0: none
  int32_t threads;
  float scale, soft_cap;                    // soft_cap 0: none
  const float *sinks, *k_scale, *v_scale;  // [Hq], [Hkv], [Hkv]; null: none
  octavo::Parallel parallel;
};

namespace octavo {

enum Outcome { kDone = 0, kUnsoundBatch = 1, kOutOfMemory = 2 };

template <typename KV>
Outcome attend_to(const OctavoAttention& a) {
  Call<KV> call{};
  call.q = {a.q, a.q_is_bfloat16 != 0};
  call.q_token_stride = a.q_strides[0];
  call.q_head_stride = a.q_strides[1];
  call.k = {static_cast<const KV*>(a.k_pool), a.k_strides[0], a.k_strides[1], a.k_strides[2]};
  call.v = {static_cast<const KV*>(a.v_pool), a.v_strides[0], a.v_strides[1], a.v_strides[2]};
  call.tables = a.tables;
  call.table_stride = a.table_stride;
  call.lengths = a.lengths;
  call.query_starts = a.query_starts;
  call.out = {a.out, a.q_is_bfloat16 != 0};
  call.sequences = a.sequences;
  call.heads = a.heads;
  call.kv_heads = a.kv_heads;
  call.dim = a.dim;
  call.block_size = a.block_size;
  call.scale = a.scale * kLog2E;
  call.soft_cap = a.soft_cap * kLog2E;
  call.sinks = a.sinks;
  call.k_scale = a.k_scale;
  call.v_scale = a.v_scale;
  call.window = a.window ? a.window : std::numeric_limits<int>::max();
  call.threads = {a.parallel, std::max(1, a.threads)};
  if (!sound(call, a.tokens, a.num_blocks, a.table_width)) return kUnsoundBatch;
  switch (a.dim) {  // the usual head sizes get loops of known length
    case 64: attend<64>(call); break;
    case 128: attend<128>(call); break;
    default: attend<0>(call);
  }
  return kDone;
}

}  // namespace octavo

// Head sizes: multiples of 16 (the caller checks). Returns an Outcome; nothing was written unless it is kDone.
extern "C" __attribute__((visibility("default"))) int octavo_paged_attention(const OctavoAttention* arguments) {
  try {
    switch (arguments->kv_type) {
      case octavo::kBFloat16: return octavo::attend_to<octavo::BFloat16>(*arguments);
      case octavo::kE4M3: return octavo::attend_to<octavo::E4M3>(*arguments);
      case octavo::kE5M2: return octavo::attend_to<octavo::E5M2>(*arguments);
      default: return octavo::attend_to<float>(*arguments);
    }
  } catch (const std::bad_alloc&) {
    return octavo::kOutOfMemory;
  }
}
