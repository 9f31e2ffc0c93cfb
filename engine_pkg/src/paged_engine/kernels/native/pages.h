// The memory layout of a page (see PageLayout in api.h), rotary embedding, and writing keys and values into pages.
#pragma once

#include "elements.h"
#include "panels.h"
#include "quantized_heads.h"
#include "team.h"

namespace {

// How many of a key's elements, and how many tokens' values, lie beside each other.
template <class Element>
constexpr int kKeyPair = 1;
template <>
constexpr int kKeyPair<bf16> = 2;
template <>
constexpr int kKeyPair<int8_t> = 4;
template <class Element>
constexpr int kValuePair = 1;
template <>
constexpr int kValuePair<bf16> = 2;
template <>
constexpr int kValuePair<int8_t> = 2;

// Addresses inside one layer's cache, [num_pages][num_kv_heads][keys, values][page_size * head_dim], in int8 with the tokens'
// scales behind them.
template <class Element>
struct Pages {
  static constexpr bool kInCodes = sizeof(Element) == 1;
  Element* cache;
  int num_kv_heads, head_dim, page_size;
  bool in_panels;

  Pages(const PageLayout& layout, void* memory)
      : cache((Element*)memory),
        num_kv_heads(layout.num_kv_heads),
        head_dim(layout.head_dim),
        page_size(layout.page_size),
        in_panels(page_size % kPanelWidth == 0 && head_dim % kPanelWidth == 0) {}

  int64_t half() const { return int64_t(page_size) * (head_dim + (kInCodes ? sizeof(float) : 0)); }
  Element* keys(int64_t page, int head) const { return cache + (page * num_kv_heads + head) * 2 * half(); }
  Element* values(int64_t page, int head) const { return keys(page, head) + half(); }
  float* scales(Element* codes) const { return (float*)(codes + int64_t(page_size) * head_dim); }
};

// One token's `size` elements among panels of keys that are `dim` deep, of values that are `dim` wide, or among rows.
template <class Element>
inline void put_key(Element* panels, int offset, const Element* key, int size, int dim) {
  constexpr int kPair = kKeyPair<Element>;
  Element* out = panels + offset / kPanelWidth * kPanelWidth * dim + offset % kPanelWidth * kPair;
  for (int d = 0; d < size; d += kPair) memcpy(out + d * kPanelWidth, key + d, smaller(kPair, size - d) * sizeof(Element));
}
template <class Element>
inline void put_value(Element* panels, int offset, const Element* value, int size, int dim) {
  constexpr int kPair = kValuePair<Element>;
  Element* out = panels + offset / kPair * kPair * dim + offset % kPair;
  for (int d = 0; d < size; d++) out[d * kPair] = value[d];
}
template <class Element>
inline void put_row(Element* rows, int offset, const Element* row, int size) {
  memcpy(rows + int64_t(offset) * size, row, size * sizeof(Element));
}

// Puts tokens into pages, one head at a time, which may be changed by it.
template <class Element>
class PageWriter {
 public:
  static size_t bytes(int head_dim) { return Pieces::bytes<Element>(head_dim); }
  PageWriter(const Pages<Element>& pages, void* memory) : pages_(pages), row_((Element*)memory) {}

  void put(int64_t slot, int head, float* key, float* value) const {
    const int64_t page = slot / pages_.page_size;
    const int offset = int(slot % pages_.page_size), dim = pages_.head_dim;
    Element *keys = pages_.keys(page, head), *values = pages_.values(page, head);
    encode(keys, offset, key, kCodeBias);
    pages_.in_panels ? put_key(keys, offset, row_, dim, dim) : put_row(keys, offset, row_, dim);
    encode(values, offset, value, 0);
    pages_.in_panels ? put_value(values, offset, row_, dim, dim) : put_row(values, offset, row_, dim);
  }

 private:
  // The head as an element row; in int8 as code + bias, and its scale into the page.
  void encode(Element* half, int offset, float* x, int bias) const {
    if constexpr (Pages<Element>::kInCodes)
      pages_.scales(half)[offset] =
          quantize_head(x, x, pages_.head_dim, [&](int i, IntVector whole) { store(row_ + i, whole + bias); });
    else
      convert(x, row_, pages_.head_dim);
  }

  const Pages<Element> pages_;
  Element* row_;
};

inline const void* head_of(const Heads& heads, int64_t token, int head, ElementType type) {
  return at(heads.data, token * heads.token_stride + head * heads.head_stride, type);
}

// x / rms(x) * weight over `size` elements, in place.
inline void normalize(float* x, const float* weight, int size, float epsilon) {
  Vector squares = {};
  for_each_vector(size, [&](int64_t i, int count) {
    const Vector v = load(x + i, count);
    squares = multiply_add(v, v, squares);
  });
  const Vector factor = broadcast(1.0f / __builtin_sqrtf(horizontal_sum(squares) / size + epsilon));
  for_each_vector(size, [=](int64_t i, int count) {
    store(x + i, load(x + i, count) * factor * load(weight + i, count), count);
  });
}

// Turns the first rotary_dim elements of a head by the angles of the token's position, in place.
inline void rotate(float* x, const Rotary& rotary, int64_t token) {
  const int half = rotary.rotary_dim / 2;
  const float* cosines = rotary.cosines + rotary.positions[token] * half;
  const float* sines = rotary.sines + rotary.positions[token] * half;
  if (rotary.interleaved) {
    for (int i = 0; i < half; i++) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cosines[i] - b * sines[i];
      x[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
    return;
  }
  for_each_vector(half, [=](int64_t i, int count) {
    const Vector a = load(x + i, count), b = load(x + half + i, count);
    const Vector c = load(cosines + i, count), s = load(sines + i, count);
    store(x + i, a * c - b * s, count);
    store(x + half + i, b * c + a * s, count);
  });
}

template <class Element>
void write_pages(const Pages<Element>& pages, const Heads& keys, const Heads& values, ElementType type,
                 const int64_t* slots, int64_t num_tokens, Team& team) {
  const int dim = pages.head_dim;
  static thread_local Scratch scratch;
  Pieces pieces(scratch.reserve(2 * Pieces::bytes<float>(dim) + PageWriter<Element>::bytes(dim)));
  float* key = pieces.take<float>(dim);
  float* value = pieces.take<float>(dim);
  const PageWriter<Element> writer(pages, pieces.take<Element>(dim));
  team.divide(num_tokens, [&](int64_t token) {
    for (int head = 0; head < pages.num_kv_heads; head++) {
      read_row(head_of(keys, token, head, type), type, key, dim);
      read_row(head_of(values, token, head, type), type, value, dim);
      writer.put(slots[token], head, key, value);
    }
  });
}

template <class Element>
void rotate_and_write(const Pages<Element>& pages, const AttentionLayer& layer, const Rotary& rotary, const Heads& query,
                      const Heads& keys, const Heads& values, const int64_t* slots, int64_t num_tokens, Team& team) {
  const int dim = pages.head_dim;
  const ElementType type = layer.query_type;
  static thread_local Scratch scratch;
  Pieces pieces(scratch.reserve(2 * Pieces::bytes<float>(dim) + PageWriter<Element>::bytes(dim)));
  float* turned = pieces.take<float>(dim);
  float* value = pieces.take<float>(dim);
  const PageWriter<Element> writer(pages, pieces.take<Element>(dim));
  const auto turn = [&](const void* from, const float* norm, int64_t token) {
    read_row(from, type, turned, dim);
    if (norm) normalize(turned, norm, dim, rotary.norm_epsilon);
    rotate(turned, rotary, token);
  };
  team.wait();
  team.divide(num_tokens, [&](int64_t token) {
    for (int head = 0; head < layer.num_query_heads; head++) {
      void* q = (void*)head_of(query, token, head, type);
      turn(q, rotary.query_norm, token);
      write_row(turned, q, type, dim);
    }
    for (int head = 0; head < pages.num_kv_heads; head++) {
      turn(head_of(keys, token, head, type), rotary.key_norm, token);
      read_row(head_of(values, token, head, type), type, value, dim);
      writer.put(slots[token], head, turned, value);
    }
  });
}

// Calls f with a value of the C++ type of what the pages hold.
template <class Function>
inline void with_page_type(const PageLayout& layout, Function f) {
  if (layout.element_type == kInt8)
    f(int8_t{});
  else
    with_type(layout.element_type, f);
}

}  // namespace
