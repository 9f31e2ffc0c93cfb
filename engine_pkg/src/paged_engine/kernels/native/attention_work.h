// How a step's attention is cut into pieces of work for the threads.
#pragma once

#include "elements.h"
#include "panels.h"
#include "softmax.h"
#include "team.h"

namespace {

constexpr int kSpan = 256;
constexpr int kSpanPanels = kSpan / kPanelWidth;
constexpr int64_t kMaxPartialFloats = 4 << 20;  // memory that partial results may take

// A block of rows of one sequence and KV head over a range of spans, done by one thread.
struct WorkItem {
  int32_t sequence, kv_head;
  int32_t row_begin, row_end;
  int32_t span_begin, span_end;
  int64_t partial;  // where its partial results begin, in floats; -1: the item covers all spans
};

struct Sequence {
  int query_start, num_queries, context_len;
  const int32_t* pages;

  Sequence(const AttentionStep& step, int i)
      : query_start(step.query_starts[i]),
        num_queries(step.query_starts[i + 1] - query_start),
        context_len(step.context_lens[i]),
        pages(step.page_indices + step.page_indptr[i]) {}

  int position(int query) const { return context_len - num_queries + query; }
};

// Which keys a query at `position` sees: [begin, end).
struct Visible {
  int begin, end;
  Visible(const AttentionLayer& layer, int position)
      : begin(layer.sliding_window > 0 ? larger(0, position + 1 - layer.sliding_window) : 0), end(position + 1) {}
};

// The step's work: items that finish their rows or leave pieces of them, and the items that merge the pieces. Chunks,
// the longest items, come first.
class WorkList {
 public:
  WorkItem* items;
  WorkItem* merges;
  int num_items = 0, num_merges = 0;
  int64_t partial_floats = 0;

  WorkList(const AttentionLayer& layer, const AttentionStep& step, int item_rows, int dim) {
    static thread_local Scratch scratch;
    const int heads = layer.pages.num_kv_heads;
    int64_t num_blocks = 0, num_spans = 0;
    for_each_block(layer, step, item_rows, [&](const WorkItem& block) {
      num_blocks += heads;
      num_spans += heads * int64_t(block.span_end - block.span_begin);
    });
    items = (WorkItem*)scratch.reserve((num_spans + num_blocks) * sizeof(WorkItem));
    merges = items + num_spans;
    const int64_t long_item = larger<int64_t>(1, num_spans / (4 * step.num_threads));
    for_each_block(layer, step, item_rows, [&](WorkItem block) {
      const int spans = block.span_end - block.span_begin;
      const int64_t floats = State::floats(block.row_end - block.row_begin, dim);
      for (block.kv_head = 0; block.kv_head < heads; block.kv_head++)
        if (spans > long_item && partial_floats + spans * floats <= kMaxPartialFloats)
          split(block, floats);
        else
          items[num_items++] = block;
    });
  }

 private:
  void split(WorkItem block, int64_t floats) {
    block.partial = partial_floats;
    merges[num_merges++] = block;
    WorkItem piece = block;
    for (int span = block.span_begin; span < block.span_end; span++) {
      piece.span_begin = span;
      piece.span_end = span + 1;
      piece.partial = partial_floats;
      items[num_items++] = piece;
      partial_floats += floats;
    }
  }

  template <class Function>
  static void for_each_block(const AttentionLayer& layer, const AttentionStep& step, int item_rows, Function f) {
    const int group = layer.num_query_heads / layer.pages.num_kv_heads;
    for (int i = step.num_sequences - 1; i >= 0; i--) {
      const Sequence sequence(step, i);
      const int rows = sequence.num_queries * group, blocks = ceil_div(rows, item_rows);
      for (int block = blocks - 1; block >= 0; block--) {
        WorkItem item = {};
        item.sequence = i;
        item.row_begin = block * item_rows;
        item.row_end = smaller(rows, item.row_begin + item_rows);
        item.span_begin = Visible(layer, sequence.position(item.row_begin / group)).begin / kSpan;
        item.span_end = ceil_div(Visible(layer, sequence.position((item.row_end - 1) / group)).end, kSpan);
        item.partial = -1;
        f(item);
      }
    }
  }
};

}  // namespace
