// The C interface of the library. Every function below exists once per variant, its name ending in the variant's.
//
// kernels/library.py mirrors these structures field by field and compares their sizes when it loads the library.
// Strides count elements. Nothing here allocates for the caller, keeps a pointer, or fails: the caller checks shapes.
#pragma once

#include <cstdint>

extern "C" {

enum ElementType : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };

enum Activation : int32_t { kIdentity = 0, kSilu = 1, kGeluTanh = 2 };

// Where keys and values lie. A page holds, per KV head, its keys and then its values. With page_size and head_dim
// multiples of 16 both are panels of 16 tokens (see panels.h): keys [page_size / 16][head_dim / pair][16][pair], values
// [page_size / pair][head_dim][pair], where pair is 2 for bf16 and 1 otherwise. Other sizes: both [page_size][head_dim].
// int8 (quantized_heads.h) takes multiples of 16 only: pair is 4 for keys, whose codes are stored + 128, and 2 for values, and
// behind the keys, as behind the values, come the tokens' scales, float [page_size].
struct PageLayout {
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t page_size;
  ElementType element_type;
};

struct AttentionLayer {
  PageLayout pages;
  int32_t num_query_heads;
  ElementType query_type;
  int32_t sliding_window;  // keys a query sees, its own included; 0: all before it
  float scale;
  float soft_cap;  // 0: none
};

// One step's sequences, as in execution/batch.py.
struct AttentionStep {
  int32_t num_sequences;
  int32_t num_threads;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* page_indptr;
  const int32_t* page_indices;
};

// Rows of heads: element d of head h of token t is data[t * token_stride + h * head_stride + d].
struct Heads {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

// Rotary embedding of the first rotary_dim elements of each head, and an RMS norm of the whole head before it.
struct Rotary {
  int32_t rotary_dim;
  int32_t interleaved;  // 0: element i turns with i + rotary_dim / 2; 1: elements 2i and 2i + 1 turn together
  const float* cosines;  // [position][rotary_dim / 2]
  const float* sines;
  const int64_t* positions;  // [num_tokens]
  const float* query_norm;  // [head_dim] or null
  const float* key_norm;
  float norm_epsilon;
};

// y = activation(x Wᵀ * scales + bias); weights in panels of 16 output channels as pack_linear or pack_int8 leaves them.
struct Linear {
  const void* weights;
  const float* scales;  // [out_features] or null; those of int8 groups lie with their weights
  const float* bias;    // [out_features] or null
  int32_t in_features;
  int32_t out_features;
  ElementType weight_type;  // float32 takes float32 x; bfloat16 and int8 take bfloat16 x
  ElementType output_type;  // float32 or bfloat16
  Activation activation;    // other than identity: panels alternate gate and up, y is activation(gate) * up
  int32_t accumulate;       // 1: added to y
};

// A pre-norm decoder layer: x += attention(norm(x)); x += mlp(norm(x)), either branch with a norm of its own at its end.
struct DecoderLayer {
  AttentionLayer attention;
  Rotary rotary;  // without positions
  int32_t hidden_size;
  float norm_epsilon;
  const float* input_norm;             // [hidden_size]
  const float* attention_output_norm;  // or null
  const float* mlp_norm;
  const float* mlp_output_norm;  // or null
  Linear qkv;                    // to [query heads, key heads, value heads]
  Linear attention_output;       // accumulates, unless a norm follows
  Linear gate_and_up;
  Linear down;
  void* cache;
};

// What a stack of layers works on. Buffers hold num_tokens rows; their elements are the layers' query_type, or float.
struct DecoderStep {
  AttentionStep attention;
  int64_t num_tokens;
  const int64_t* positions;
  const int64_t* slots;
  float* residual;   // [hidden_size], in and out
  void* normed;      // [hidden_size]
  void* qkv;         // [all heads]
  void* attended;    // [query heads]
  void* gated;       // [intermediate size]
  float* projected;  // [hidden_size]
};

#define PAGED_ENGINE_DECLARE(variant)                                                                                   \
  void attention_##variant(const AttentionLayer*, const AttentionStep*, const Heads* query, const void* cache,          \
                           const float* sinks, void* out);                                                              \
  void write_pages_##variant(const PageLayout*, const Heads* keys, const Heads* values, ElementType,                    \
                             const int64_t* slots, int64_t num_tokens, void* cache, int32_t num_threads);               \
  void rotate_and_write_##variant(const AttentionLayer*, const Rotary*, const Heads* query, const Heads* keys,          \
                                  const Heads* values, const int64_t* slots, int64_t num_tokens, void* cache,           \
                                  int32_t num_threads);                                                                 \
  /* residual += x where x is given; out = residual / rms(residual) * weight where out is given */                      \
  void rms_norm_##variant(const void* x, void* residual, const float* weight, void* out, int64_t num_rows,              \
                          int64_t size, float epsilon, ElementType type, ElementType residual_type,                     \
                          int32_t num_threads);                                                                         \
  void gate_##variant(const void* gate_and_up, void* out, int64_t num_rows, int64_t size, Activation, ElementType,      \
                      int32_t num_threads);                                                                             \
  void pack_linear_##variant(const void* weight, void* packed, int64_t out_features, int64_t in_features, ElementType,  \
                             int32_t num_threads);                                                                      \
  /* quantizes as quantized.h says; the element type is the weight's */                                                \
  void pack_int8_##variant(const void* weight, uint8_t* packed, int64_t out_features, int64_t in_features, ElementType, \
                           int32_t num_threads);                                                                        \
  void linear_##variant(const Linear*, const void* x, int64_t x_stride, int64_t num_rows, void* y, int64_t y_stride,    \
                        int32_t num_threads);                                                                           \
  void decode_##variant(const DecoderLayer*, int32_t num_layers, const DecoderStep*);                                   \
  void argmax_##variant(const void* x, int64_t num_rows, int64_t size, ElementType, int64_t* out,                       \
                        int32_t num_threads);                                                                           \
  void log_sum_exp_##variant(const void* x, int64_t num_rows, int64_t size, ElementType, float* out,                    \
                             int32_t num_threads);

PAGED_ENGINE_DECLARE(generic)
PAGED_ENGINE_DECLARE(avx2)
PAGED_ENGINE_DECLARE(avx512)
PAGED_ENGINE_DECLARE(amx)
}
