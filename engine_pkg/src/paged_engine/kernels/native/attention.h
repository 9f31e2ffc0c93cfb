// Paged attention for any mix of single tokens and chunks, read straight from the pages.
//
// The rows of a sequence are its (token, query head) pairs that share a KV head. A row's keys are cut into spans of
// kSpan at fixed positions. Softmax and values are computed per span and the spans' results are merged in ascending
// order, by one thread or, where few sequences have long contexts, from partial results of many threads: the same
// arithmetic either way. So a row's result depends neither on the rows beside it nor on the number of threads.
#pragma once

#include "spans.h"
#include "tiles.h"

namespace {

// Queries times keys by KeyProduct, softmax weights times values by ValueProduct.
template <class KeyProduct, class ValueProduct>
class AttentionWorker {
  using Element = typename KeyProduct::Right;
  using Query = typename KeyProduct::Left;
  using Weight = typename ValueProduct::Left;
  static constexpr bool kInCodes = Pages<Element>::kInCodes;

 public:
  static constexpr int kItemRows = kBlockRows * 4;
  static int padded(int head_dim) { return ceil_div(head_dim, kPanelWidth) * kPanelWidth; }

  AttentionWorker(const AttentionLayer& layer, const AttentionStep& step, const Heads& query, const void* cache,
                  const float* sinks, void* out)
      : layer_(layer),
        step_(step),
        query_(query),
        pages_(layer.pages, (void*)cache),
        sinks_(sinks),
        out_(out),
        group_(layer.num_query_heads / layer.pages.num_kv_heads),
        dim_(padded(layer.pages.head_dim)),
        spans_(pages_, dim_) {
    static thread_local Scratch scratch;
    const size_t bytes = Pieces::bytes<Query>(kItemRows * dim_) + 2 * Pieces::bytes<float>(kItemRows) +
                         Pieces::bytes<float>(State::floats(kItemRows, dim_)) + Pieces::bytes<float>(kBlockRows * kSpan) +
                         Pieces::bytes<Weight>(kBlockRows * kSpan) + Pieces::bytes<float>(kBlockRows * dim_);
    Pieces pieces(scratch.reserve(bytes));
    queries_ = pieces.take<Query>(kItemRows * dim_);
    query_scales_ = pieces.take<float>(kItemRows);
    query_starts_ = pieces.take<float>(kItemRows);
    state_memory_ = pieces.take<float>(State::floats(kItemRows, dim_));
    scores_ = pieces.take<float>(kBlockRows * kSpan);
    weights_ = pieces.take<Weight>(kBlockRows * kSpan);
    block_values_ = pieces.take<float>(kBlockRows * dim_);
  }

  // Attends an item; leaves its rows in `out`, or the partial state of each of its spans.
  void run(const WorkItem& item, float* partials) {
    const Sequence sequence(step_, item.sequence);
    const int rows = item.row_end - item.row_begin;
    gather_queries(sequence, item);
    State state(state_memory_, rows, dim_);
    state.clear(rows);
    for (int span = item.span_begin; span < item.span_end; span++) {
      if (item.partial >= 0) {
        state = partial_state(item, span, partials, rows);
        state.clear(rows);
      }
      attend_span(sequence, item, span, state);
    }
    if (item.partial < 0) finish(sequence, item, state);
  }

  // Merges the partial states of an item's spans and writes its rows.
  void merge_partials(const WorkItem& item, float* partials) {
    const Sequence sequence(step_, item.sequence);
    const int rows = item.row_end - item.row_begin;
    State state(state_memory_, rows, dim_);
    state.clear(rows);
    for (int span = item.span_begin; span < item.span_end; span++) {
      const State part = partial_state(item, span, partials, rows);
      for (int r = 0; r < rows; r++) merge(state, r, part.maxima[r], part.sums[r], part.values + int64_t(r) * dim_, 1);
    }
    finish(sequence, item, state);
  }

 private:
  State partial_state(const WorkItem& item, int span, float* partials, int rows) const {
    const int64_t floats = State::floats(rows, dim_);
    return State(partials + item.partial + (span - item.span_begin) * floats, rows, dim_);
  }
  int query_head(const WorkItem& item, int row) const { return item.kv_head * group_ + row % group_; }
  Visible visible(const Sequence& sequence, int row) const { return {layer_, sequence.position(row / group_)}; }

  void gather_queries(const Sequence& sequence, const WorkItem& item) {
    const int head_dim = pages_.head_dim;
    for (int row = item.row_begin; row < item.row_end; row++) {
      const int local = row - item.row_begin;
      Query* to = queries_ + int64_t(local) * dim_;
      const void* from = head_of(query_, sequence.query_start + row / group_, query_head(item, row), layer_.query_type);
      if constexpr (kInCodes) {
        IntVector sum = {};
        with_type(layer_.query_type, [&](auto element) {
          const auto* x = (const decltype(element)*)from;
          const float scale = quantize_head(x, block_values_, head_dim, [&](int i, IntVector whole) {
            sum += whole;
            KeyProduct::write(to + i, whole);
          });
          query_scales_[local] = scale < kNegligible ? kNegligible : scale;  // not 0, with which -infinity would be NaN
        });
        query_starts_[local] = float(-kCodeBias * horizontal_sum(sum));
      } else {
        read_row(from, layer_.query_type, to, head_dim);
        memset((void*)(to + head_dim), 0, (dim_ - head_dim) * sizeof(Query));
      }
    }
  }

  void attend_span(const Sequence& sequence, const WorkItem& item, int index, const State& state) {
    Span<Element> span, next;
    spans_.find(sequence, item.kv_head, index, span);
    const bool fetch_next = pages_.in_panels && item.row_end - item.row_begin <= kBlockRows;
    if (fetch_next) {
      spans_.find(sequence, item.kv_head, index + 1 < item.span_end ? index + 1 : index, next);
      for (int i = 0; kInCodes && i < next.num_panels(); i++) {
        fetch(next.key_scales[i]);
        fetch(next.value_scales[i]);
      }
      for (int i = next.num_panels(); i < kSpanPanels; i++) next.keys[i] = next.keys[0];
    }
    spans_.silence_last_values(span);
    for (int row = item.row_begin; row < item.row_end; row += kBlockRows) {
      const int rows = smaller(kBlockRows, item.row_end - row);
      const int begin = visible(sequence, row).begin - span.start, end = visible(sequence, row + rows - 1).end - span.start;
      const int panel_begin = larger(begin, 0) / kPanelWidth;
      const int panel_end = ceil_div(smaller(end, span.num_keys), kPanelWidth);
      if (panel_begin >= panel_end) continue;
      if (fetch_next)
        attend_block<true>(sequence, item, row, rows, span, next.keys, panel_begin, panel_end, state);
      else
        attend_block<false>(sequence, item, row, rows, span, nullptr, panel_begin, panel_end, state);
    }
  }

  // While the keys are read the values are fetched, and meanwhile the next span's keys.
  template <bool Fetch>
  void attend_block(const Sequence& sequence, const WorkItem& item, int row, int rows, const Span<Element>& span,
                    const Element* const* next_keys, int panel_begin, int panel_end, const State& state) {
    const int num_panels = panel_end - panel_begin, first = panel_begin * kPanelWidth, local = row - item.row_begin;
    constexpr int kValuePair = ValueProduct::kPair;
    Panels<Element> keys = {span.keys + panel_begin, 1, 0, 1, 0, dim_, kPanelWidth * KeyProduct::kPair, num_panels};
    Panels<Element> values = {span.values + panel_begin, num_panels,        1,          0, kPanelWidth * kValuePair,
                              kPanelWidth,               dim_ * kValuePair, dim_ / kPanelWidth};
    if constexpr (Fetch) {
      keys.upcoming = span.values + panel_begin;
      values.upcoming = next_keys + panel_begin;
    }
    multiply<KeyProduct, Fetch>(queries_ + int64_t(local) * dim_, dim_, rows, keys, scores_ + first, kSpan);
    float maxima[kBlockRows], sums[kBlockRows], value_scales[kBlockRows];
    for (int r = 0; r < rows; r++) {
      const Visible seen = visible(sequence, row + r);
      const int begin = seen.begin - span.start, end = seen.end - span.start;
      float* scores = scores_ + r * kSpan;
      Weight* weights = weights_ + r * kSpan;
      const auto weigh = [&](float score_scale, auto keep) {
        softmax(layer_, scores, score_scale, panel_begin, panel_end, begin, end, &maxima[r], &sums[r], keep);
      };
      if constexpr (kInCodes) {
        scale_scores(scores + first, num_panels, query_starts_[local + r], span.key_scales + panel_begin);
        ScaledWeights scaled(scores, span.value_scales);
        weigh(query_scales_[local + r], [&](int i, Vector weight) { scaled.keep(i, weight); });
        value_scales[r] = scaled.quantize(weights, first, panel_end * kPanelWidth);
      } else {
        weigh(1, [=](int i, Vector weight) { store(weights + i, weight); });
        value_scales[r] = 1;
      }
    }
    multiply<ValueProduct, Fetch>(weights_ + first, kSpan, rows, values, block_values_, dim_);
    for (int r = 0; r < rows; r++) merge(state, local + r, maxima[r], sums[r], block_values_ + r * dim_, value_scales[r]);
  }

  void finish(const Sequence& sequence, const WorkItem& item, const State& state) {
    for (int row = item.row_begin; row < item.row_end; row++) {
      const int local = row - item.row_begin, head = query_head(item, row);
      float sum = state.sums[local], factor = 1;
      if (sinks_) {
        const float sink = sinks_[head] * kLog2E, highest = larger(state.maxima[local], sink);
        factor = power_of_2(state.maxima[local] - highest);
        sum = sum * factor + power_of_2(sink - highest);
      }
      float* values = state.values + int64_t(local) * dim_;
      const Vector scale = broadcast(factor / sum);
      for (int d = 0; d < dim_; d += kWidth) store(values + d, load(values + d) * scale);
      if constexpr (kInCodes) transform_head(values, values, dim_);
      const int64_t token = sequence.query_start + row / group_;
      write_row(values, at(out_, (token * layer_.num_query_heads + head) * pages_.head_dim, layer_.query_type),
                layer_.query_type, pages_.head_dim);
    }
  }

  const AttentionLayer& layer_;
  const AttentionStep& step_;
  const Heads& query_;
  const Pages<Element> pages_;
  const float* sinks_;
  void* out_;
  const int group_;
  const int dim_;  // head_dim, rounded up to whole panels
  const SpanReader<Element> spans_;
  Query* queries_;
  float* query_scales_;  // of queries in codes: what code 1 stands for,
  float* query_starts_;  // and where their products start
  float* state_memory_;
  float* scores_;
  Weight* weights_;
  float* block_values_;
};

template <class Worker>
void attend(const AttentionLayer& layer, const AttentionStep& step, const Heads& query, const void* cache,
            const float* sinks, void* out, Team& team) {
  const WorkList work(layer, step, Worker::kItemRows, Worker::padded(layer.pages.head_dim));
  TileScope tiles;
  Worker worker(layer, step, query, cache, sinks, out);
  team.wait();
  float* partials = work.num_merges > 0 ? (float*)team.share_memory(work.partial_floats * sizeof(float)) : nullptr;
  team.share(work.num_items, [&](int64_t i, int64_t) { worker.run(work.items[i], partials); });
  if (work.num_merges == 0) return;
  team.wait();
  team.share(work.num_merges, [&](int64_t i, int64_t) { worker.merge_partials(work.merges[i], partials); });
}

inline void attend(const AttentionLayer& layer, const AttentionStep& step, const Heads& query, const void* cache,
                   const float* sinks, void* out, Team& team) {
  const auto run = [&](auto key_product, auto value_product) {
    attend<AttentionWorker<decltype(key_product), decltype(value_product)>>(layer, step, query, cache, sinks, out, team);
  };
  const ElementType type = layer.pages.element_type;
  if (type == kInt8) return run(KeyCodes{}, ValueCodes{});
  if (type == kFloat32) return run(FloatProduct<float>{}, FloatProduct<float>{});
  if (type == kFloat16) return run(FloatProduct<fp16>{}, FloatProduct<fp16>{});
  if (layer.query_type == kBfloat16) return run(BestBf16Product{}, BestBf16Product{});
  run(Bf16Product{}, Bf16Product{});
}

}  // namespace
