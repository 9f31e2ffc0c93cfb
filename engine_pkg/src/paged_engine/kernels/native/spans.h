// Where the keys and values of a span lie: panels in pages, or packed into panels where pages do not hold any.
#pragma once

#include "attention_work.h"
#include "pages.h"

namespace {

template <class Element>
struct Span {
  int start, num_keys;  // position of the first key; 0 keys: nothing is there
  const Element *keys[kSpanPanels], *values[kSpanPanels];            // panels
  const float *key_scales[kSpanPanels], *value_scales[kSpanPanels];  // theirs, of pages in codes

  int num_panels() const { return ceil_div(num_keys, kPanelWidth); }
};

// Finds spans for one thread. A span may use the reader's memory, until the next one is packed or silenced.
template <class Element>
class SpanReader {
  static constexpr bool kInCodes = Pages<Element>::kInCodes;

 public:
  // `dim` is the head size, rounded up to whole panels.
  SpanReader(const Pages<Element>& pages, int dim) : pages_(pages), dim_(dim) {
    static thread_local Scratch scratch;
    const int packed_span = pages.in_panels ? 0 : kSpan * dim;
    Pieces pieces(scratch.reserve(2 * Pieces::bytes<Element>(packed_span) + Pieces::bytes<Element>(kPanelWidth * dim) +
                                  Pieces::bytes<float>(kPanelWidth)));
    packed_keys_ = pieces.take<Element>(packed_span);
    packed_values_ = pieces.take<Element>(packed_span);
    last_values_ = pieces.take<Element>(kPanelWidth * dim);
    last_scales_ = pieces.take<float>(kPanelWidth);
  }

  void find(const Sequence& sequence, int kv_head, int index, Span<Element>& span) const {
    span.start = index * kSpan;
    span.num_keys = smaller(sequence.context_len - span.start, kSpan);
    if (!pages_.in_panels) return pack(sequence, kv_head, span);
    const int32_t* page = sequence.pages + span.start / pages_.page_size;
    int offset = span.start % pages_.page_size;
    for (int i = 0; i < span.num_panels(); i++, offset += kPanelWidth) {
      if (offset == pages_.page_size) {
        page++;
        offset = 0;
      }
      Element *keys = pages_.keys(*page, kv_head), *values = pages_.values(*page, kv_head);
      span.keys[i] = keys + int64_t(offset) * dim_;
      span.values[i] = values + int64_t(offset) * dim_;
      if constexpr (kInCodes) {
        span.key_scales[i] = pages_.scales(keys) + offset;
        span.value_scales[i] = pages_.scales(values) + offset;
      }
    }
  }

  // What lies behind the last token of a panel may be anything, even NaN, which a weight of zero would not silence.
  void silence_last_values(Span<Element>& span) const {
    constexpr int kPair = kValuePair<Element>;
    const int panel = span.num_panels() - 1, last = span.num_keys % kPanelWidth;
    if (last == 0 || !pages_.in_panels) return;
    if constexpr (kInCodes) {
      for (int i = 0; i < kPanelWidth; i++) last_scales_[i] = i < last ? span.value_scales[panel][i] : 0;
      span.value_scales[panel] = last_scales_;
    } else {
      memcpy((void*)last_values_, span.values[panel], kPanelWidth * dim_ * sizeof(Element));
      for (int offset = last; offset < kPanelWidth; offset++)
        for (int d = 0; d < dim_; d++) last_values_[offset / kPair * kPair * dim_ + d * kPair + offset % kPair] = Element{};
      span.values[panel] = last_values_;
    }
  }

 private:
  void pack(const Sequence& sequence, int kv_head, Span<Element>& span) const {
    const int panel_size = kPanelWidth * dim_;
    for (int i = 0; i < span.num_panels(); i++) {
      span.keys[i] = packed_keys_ + i * panel_size;
      span.values[i] = packed_values_ + i * panel_size;
    }
    memset((void*)packed_keys_, 0, span.num_panels() * panel_size * sizeof(Element));
    memset((void*)packed_values_, 0, span.num_panels() * panel_size * sizeof(Element));
    const int head_dim = pages_.head_dim;
    for (int i = 0; i < span.num_keys; i++) {
      const int64_t page = sequence.pages[(span.start + i) / pages_.page_size];
      const int64_t from = (span.start + i) % pages_.page_size * int64_t(head_dim);
      put_key(packed_keys_, i, pages_.keys(page, kv_head) + from, head_dim, dim_);
      put_value(packed_values_, i, pages_.values(page, kv_head) + from, head_dim, dim_);
    }
  }

  const Pages<Element>& pages_;
  const int dim_;
  Element* packed_keys_;
  Element* packed_values_;
  Element* last_values_;
  float* last_scales_;
};

}  // namespace
