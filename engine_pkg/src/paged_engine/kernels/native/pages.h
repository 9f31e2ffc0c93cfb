// The memory layout of a page (see PageLayout in api.h), rotary embedding, and writing keys and values into pages.
#pragma once

#include "elements.h"
#include "panels.h"
#include "team.h"

namespace {

template <class Element>
constexpr int kPairOf = 1;
template <>
constexpr int kPairOf<bf16> = 2;

// Addresses inside one layer's cache, [num_pages][num_kv_heads][keys, values][page_size * head_dim].
template <class Element>
struct Pages {
  Element* cache;
  int num_kv_heads, head_dim, page_size;
  bool in_panels;

  Pages(const PageLayout& layout, void* memory)
      : cache((Element*)memory),
        num_kv_heads(layout.num_kv_heads),
        head_dim(layout.head_dim),
        page_size(layout.page_size),
        in_panels(page_size % kPanelWidth == 0 && head_dim % kPanelWidth == 0) {}

  int64_t half() const { return int64_t(page_size) * head_dim; }
  Element* keys(int64_t page, int head) const { return cache + (page * num_kv_heads + head) * 2 * half(); }
  Element* values(int64_t page, int head) const { return keys(page, head) + half(); }

  void put(int64_t slot, int head, const Element* key, const Element* value) const {
    const int64_t page = slot / page_size;
    const int offset = int(slot % page_size);
    if (in_panels) {
      put_key(keys(page, head), head_dim, offset, key);
      put_value(values(page, head), head_dim, offset, value);
    } else {
      memcpy(keys(page, head) + offset * head_dim, key, head_dim * sizeof(Element));
      memcpy(values(page, head) + offset * head_dim, value, head_dim * sizeof(Element));
    }
  }

  // One token among panels of keys or values that are `dim` elements deep or wide.
  static void put_key(Element* panels, int dim, int offset, const Element* key) {
    constexpr int kPair = kPairOf<Element>;
    Element* out = panels + offset / kPanelWidth * kPanelWidth * dim + offset % kPanelWidth * kPair;
    for (int d = 0; d < dim; d += kPair) memcpy(out + d * kPanelWidth, key + d, kPair * sizeof(Element));
  }
  static void put_value(Element* panels, int dim, int offset, const Element* value) {
    constexpr int kPair = kPairOf<Element>;
    Element* out = panels + offset / kPair * kPair * dim + offset % kPair;
    for (int d = 0; d < dim; d++) out[d * kPair] = value[d];
  }
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
  Element* key = (Element*)scratch.reserve(2 * dim * sizeof(Element));
  Element* value = key + dim;
  team.divide(num_tokens, [&](int64_t token) {
    for (int head = 0; head < pages.num_kv_heads; head++) {
      read_row(head_of(keys, token, head, type), type, key, dim);
      read_row(head_of(values, token, head, type), type, value, dim);
      pages.put(slots[token], head, key, value);
    }
  });
}

template <class Element>
void rotate_and_write(const Pages<Element>& pages, const AttentionLayer& layer, const Rotary& rotary, const Heads& query,
                      const Heads& keys, const Heads& values, const int64_t* slots, int64_t num_tokens, Team& team) {
  const int dim = pages.head_dim;
  const ElementType type = layer.query_type;
  static thread_local Scratch scratch;
  const size_t row = Pieces::bytes<float>(dim), element_row = Pieces::bytes<Element>(dim);
  Pieces pieces(scratch.reserve(row + 2 * element_row));
  float* head_row = pieces.take<float>(dim);
  Element* key = pieces.take<Element>(dim);
  Element* value = pieces.take<Element>(dim);
  team.wait();
  team.divide(num_tokens, [&](int64_t token) {
    for (int head = 0; head < layer.num_query_heads; head++) {
      void* q = (void*)head_of(query, token, head, type);
      read_row(q, type, head_row, dim);
      if (rotary.query_norm) normalize(head_row, rotary.query_norm, dim, rotary.norm_epsilon);
      rotate(head_row, rotary, token);
      write_row(head_row, q, type, dim);
    }
    for (int head = 0; head < pages.num_kv_heads; head++) {
      read_row(head_of(keys, token, head, type), type, head_row, dim);
      if (rotary.key_norm) normalize(head_row, rotary.key_norm, dim, rotary.norm_epsilon);
      rotate(head_row, rotary, token);
      convert(head_row, key, dim);
      read_row(head_of(values, token, head, type), type, value, dim);
      pages.put(slots[token], head, key, value);
    }
  });
}

}  // namespace
