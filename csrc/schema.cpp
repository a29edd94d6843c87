// The table of contents of fastinfer: every op's schema, one line each, grouped by family.
//
// Shapes (the Python wrappers in fastinfer/ops carry the full documentation):
//   T tokens, B sequences, H query heads, Hk key/value heads, D head size, Dv value head size.
// Conventions:
//   - an op with a fresh output has a functional overload and `.out`; an op that works in place
//   ends in `_`;
//   - lengths, sizes and counts are SymInt, so that torch.compile does not recompile for each
//   value;
//   - defaults here and in the Python wrappers are the same (tests/test_schema.py compares them).

#include <torch/csrc/stable/library.h>

#define FI_ATTENTION_OPTIONS                                                              \
  "float? scale=None, bool causal=False, SymInt window_left=-1, SymInt window_right=-1, " \
  "float softcap=0.0, Tensor? sinks=None, Tensor? tree_mask=None, "                       \
  "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, bool batch_invariant=False"
#define FI_PAGED_OPTIONS                                                                    \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale=None, bool causal=True, "         \
  "SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, Tensor? sinks=None, "  \
  "Tensor? tree_mask=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? plan=None, " \
  "bool batch_invariant=False"
#define FI_OUT_LSE "Tensor(a!) out, Tensor(b!) lse) -> ()"
// What follows a matrix product.
#define FI_EPILOGUE \
  "str activation='none', bool gated=False, Tensor? residual=None, Tensor? out_scale=None"
// Codes of 2, 3, 4 and 8 bits have one signature.
#define FI_LOW_BIT_GEMM                                                                          \
  "Tensor x, Tensor qweight, Tensor scales, Tensor? zeros=None, *, "                             \
  "SymInt group_size=128, Tensor? perm=None, Tensor? bias=None, " FI_EPILOGUE                    \
  ", ScalarType? out_dtype=None, Tensor? norm_weight=None, float norm_eps=1e-6, float "          \
  "norm_weight_offset=0.0, Tensor? outlier_offsets=None, Tensor? outlier_columns=None, Tensor? " \
  "outlier_values=None"
#define FI_FP8_SCALED_MM                                                                   \
  "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias=None, *, ScalarType? " \
  "out_dtype=None, " FI_EPILOGUE
#define FI_INT8_SCALED_MM                                                                        \
  "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? a_zero=None, Tensor? bias=None, " \
  "*, ScalarType? out_dtype=None, " FI_EPILOGUE
#define FI_QUANTIZE_OPTIONS "Tensor? scale=None, SymInt[2] block=[1, -1]"
#define FI_PORTABLE_EPILOGUE \
  "SymInt activation, bool gated, Tensor? residual, Tensor? out_scale, Tensor(a!) out) -> ()"
#define FI_PORTABLE_OPTIONS                                               \
  "float scale, SymInt window_left, SymInt window_right, float softcap, " \
  "Tensor? sinks, Tensor? tree_mask, bool batch_invariant"

STABLE_TORCH_LIBRARY(fastinfer, m) {
  // clang-format off

  // Attention: dense, ragged, paged; all return (out, lse).
  m.def("flash_attention(Tensor q, Tensor k, Tensor v, *, " FI_ATTENTION_OPTIONS ") -> (Tensor, Tensor)");
  m.def("flash_attention.out(Tensor q, Tensor k, Tensor v, *, " FI_ATTENTION_OPTIONS ", " FI_OUT_LSE);
  m.def("flash_attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *, SymInt max_seqlen_q, SymInt max_seqlen_k, " FI_ATTENTION_OPTIONS ") -> (Tensor, Tensor)");
  m.def("flash_attention_varlen.out(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *, SymInt max_seqlen_q, SymInt max_seqlen_k, " FI_ATTENTION_OPTIONS ", " FI_OUT_LSE);
  m.def("paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, *, " FI_PAGED_OPTIONS ") -> (Tensor, Tensor)");
  m.def("paged_attention.out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, *, " FI_PAGED_OPTIONS ", Tensor(c!)? workspace=None, " FI_OUT_LSE);
  m.def("plan_attention(Tensor cu_seqlens_q, Tensor seq_lens, *, SymInt total_q, SymInt num_heads, SymInt num_kv_heads, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal=True, SymInt window_left=-1, SymInt window_right=-1, bool batch_invariant=False) -> Tensor");
  m.def("plan_attention.out(Tensor cu_seqlens_q, Tensor seq_lens, *, SymInt total_q, SymInt num_heads, SymInt num_kv_heads, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal=True, SymInt window_left=-1, SymInt window_right=-1, bool batch_invariant=False, Tensor(a!) out) -> ()");
  m.def("merge_attention_states(Tensor outs, Tensor lses, *, Tensor? sinks=None) -> (Tensor, Tensor)");
  m.def("merge_attention_states.out(Tensor outs, Tensor lses, *, Tensor? sinks=None, " FI_OUT_LSE);

  // KV cache.
  m.def("append_paged_kv_cache_(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, *, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()");
  m.def("qk_norm_rope_append_(Tensor qkv, Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slot_mapping, *, Tensor? positions=None, Tensor? cos_sin=None, Tensor? bias=None, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-6, float weight_offset=0.0, bool interleaved=False, Tensor(d!)? k_scale=None, Tensor(e!)? v_scale=None) -> ()");

  // Normalisation.
  m.def("rms_norm(Tensor x, Tensor weight, float eps=1e-6, *, float weight_offset=0.0) -> Tensor");
  m.def("rms_norm.out(Tensor x, Tensor weight, float eps=1e-6, *, float weight_offset=0.0, Tensor(a!) out) -> ()");
  m.def("fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps=1e-6, *, float weight_offset=0.0) -> ()");
  m.def("layer_norm(Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-5, *, float weight_offset=0.0) -> Tensor");
  m.def("layer_norm.out(Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-5, *, float weight_offset=0.0, Tensor(a!) out) -> ()");
  m.def("fused_add_layer_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor weight, Tensor? bias=None, float eps=1e-5, *, float weight_offset=0.0) -> ()");

  // Gated activations.
  m.def("silu_and_mul(Tensor x) -> Tensor");
  m.def("silu_and_mul.out(Tensor x, *, Tensor(a!) out) -> ()");
  m.def("gelu_and_mul(Tensor x, *, bool tanh_approx=False) -> Tensor");
  m.def("gelu_and_mul.out(Tensor x, *, bool tanh_approx=False, Tensor(a!) out) -> ()");

  // Quantization of activations and weights, for int8 and fp8 GEMMs; all return (codes, scale, ...).
  m.def("quantize_fp8(Tensor x, *, " FI_QUANTIZE_OPTIONS ") -> (Tensor, Tensor)");
  m.def("quantize_fp8.out(Tensor x, *, " FI_QUANTIZE_OPTIONS ", Tensor(a!) out, Tensor(b!) out_scale) -> ()");
  m.def("quantize_int8(Tensor x, *, " FI_QUANTIZE_OPTIONS ") -> (Tensor, Tensor)");
  m.def("quantize_int8.out(Tensor x, *, " FI_QUANTIZE_OPTIONS ", Tensor(a!) out, Tensor(b!) out_scale) -> ()");
  m.def("quantize_int8_asymmetric(Tensor x) -> (Tensor, Tensor, Tensor)");
  m.def("quantize_int8_asymmetric.out(Tensor x, *, Tensor(a!) out, Tensor(b!) out_scale, Tensor(c!) out_zero_point) -> ()");

  // Rotary position embedding.
  m.def("rotary_embedding_(Tensor(a!) q, Tensor(b!)? k, Tensor positions, Tensor cos_sin, *, bool interleaved=False) -> ()");

  // Matrix products with weights of few bits.
  m.def("int2_gemm(" FI_LOW_BIT_GEMM ") -> Tensor");
  m.def("int2_gemm.out(" FI_LOW_BIT_GEMM ", Tensor(a!) out) -> ()");
  m.def("int3_gemm(" FI_LOW_BIT_GEMM ") -> Tensor");
  m.def("int3_gemm.out(" FI_LOW_BIT_GEMM ", Tensor(a!) out) -> ()");
  m.def("int4_gemm(" FI_LOW_BIT_GEMM ") -> Tensor");
  m.def("int4_gemm.out(" FI_LOW_BIT_GEMM ", Tensor(a!) out) -> ()");
  m.def("int8_gemm(" FI_LOW_BIT_GEMM ") -> Tensor");
  m.def("int8_gemm.out(" FI_LOW_BIT_GEMM ", Tensor(a!) out) -> ()");

  // Matrix products of 8-bit activations and weights, which are scaled.
  m.def("fp8_scaled_mm(" FI_FP8_SCALED_MM ") -> Tensor");
  m.def("fp8_scaled_mm.out(" FI_FP8_SCALED_MM ", Tensor(a!) out) -> ()");
  m.def("int8_scaled_mm(" FI_INT8_SCALED_MM ") -> Tensor");
  m.def("int8_scaled_mm.out(" FI_INT8_SCALED_MM ", Tensor(a!) out) -> ()");

  // Sampling.
  m.def("sample(Tensor logits, Tensor? temperature=None, *, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, Tensor? seeds=None, Tensor? positions=None) -> (Tensor, Tensor)");
  m.def("sample.out(Tensor logits, Tensor? temperature=None, *, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, Tensor? seeds=None, Tensor? positions=None, Tensor(a!) token_ids, Tensor(b!) valid) -> ()");

  // The same ops as the Triton launchers of fastinfer/triton_kernels take them: private, called from
  // csrc/portable alone, after the checks. Scale is resolved, causal is window_right 0, and an
  // activation is its number.
  m.def("_portable_rms_norm(Tensor x, Tensor weight, float eps, float weight_offset, Tensor(a!) out) -> ()");
  m.def("_portable_fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps, float weight_offset) -> ()");
  m.def("_portable_layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps, float weight_offset, Tensor(a!) out) -> ()");
  m.def("_portable_fused_add_layer_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor weight, Tensor? bias, float eps, float weight_offset) -> ()");
  m.def("_portable_silu_and_mul(Tensor x, Tensor(a!) out) -> ()");
  m.def("_portable_gelu_and_mul(Tensor x, bool tanh_approx, Tensor(a!) out) -> ()");
  m.def("_portable_quantize_fp8(Tensor x, Tensor? scale, SymInt block_rows, SymInt block_columns, Tensor(a!) out, Tensor(b!) out_scale) -> ()");
  m.def("_portable_quantize_int8(Tensor x, Tensor? scale, SymInt block_rows, SymInt block_columns, Tensor(a!) out, Tensor(b!) out_scale) -> ()");
  m.def("_portable_quantize_int8_asymmetric(Tensor x, Tensor(a!) out, Tensor(b!) out_scale, Tensor(c!) out_zero_point) -> ()");
  m.def("_portable_rotary_embedding_(Tensor(a!) q, Tensor(b!)? k, Tensor positions, Tensor cos_sin, bool interleaved) -> ()");
  m.def("_portable_append_paged_kv_cache_(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> ()");
  m.def("_portable_qk_norm_rope_append_(Tensor qkv, Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slot_mapping, Tensor? positions, Tensor? cos_sin, Tensor? bias, Tensor? q_weight, Tensor? k_weight, float eps, float weight_offset, bool interleaved, Tensor(d!)? k_scale, Tensor(e!)? v_scale) -> ()");
  m.def("_portable_low_bit_gemm(SymInt bits, Tensor x, Tensor qweight, Tensor scales, Tensor? zeros, SymInt group_size, Tensor? perm, Tensor? bias, Tensor? outlier_offsets, Tensor? outlier_columns, Tensor? outlier_values, " FI_PORTABLE_EPILOGUE);
  m.def("_portable_scaled_mm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? a_zero, Tensor? bias, " FI_PORTABLE_EPILOGUE);
  m.def("_portable_sample(Tensor logits, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor? seeds, Tensor? positions, Tensor(a!) token_ids, Tensor(b!) valid) -> ()");
  m.def("_portable_flash_attention(Tensor q, Tensor k, Tensor v, " FI_PORTABLE_OPTIONS ", Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, " FI_OUT_LSE);
  m.def("_portable_flash_attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, " FI_PORTABLE_OPTIONS ", Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, " FI_OUT_LSE);
  m.def("_portable_paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, SymInt max_seqlen_q, SymInt max_seqlen_k, " FI_PORTABLE_OPTIONS ", Tensor? k_scale, Tensor? v_scale, Tensor? plan, Tensor(c!)? workspace, " FI_OUT_LSE);
  m.def("_portable_plan_attention(Tensor cu_seqlens_q, Tensor seq_lens, SymInt total_q, SymInt num_heads, SymInt num_kv_heads, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt window_left, SymInt window_right, bool batch_invariant, Tensor(a!) out) -> ()");
  m.def("_portable_merge_attention_states(Tensor outs, Tensor lses, Tensor? sinks, " FI_OUT_LSE);


  // Configurations of low-bit products, called from fastinfer/tuning.py alone: those that the kernels
  // have for a product, and the table of those measured on a device. The second returns how many
  // entries of the table are usable.
  m.def("_gemm_configs(Tensor shape, SymInt sms) -> Tensor");
  m.def("_set_gemm_configs(str device_name, Tensor rows) -> SymInt");

  // clang-format on
}
