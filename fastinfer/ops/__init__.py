"""Typed, documented wrappers of `torch.ops.fastinfer.*`, one file per family."""

from fastinfer.ops._backend import backends, op_families, op_names
from fastinfer.ops._outliers import Outliers
from fastinfer.ops.activation import gelu_and_mul, silu_and_mul
from fastinfer.ops.attention import (
    attention_plan_size,
    flash_attention,
    flash_attention_varlen,
    merge_attention_states,
    paged_attention,
    paged_attention_workspace_size,
    plan_attention,
)
from fastinfer.ops.gemm import int2_gemm, int3_gemm, int4_gemm, int8_gemm
from fastinfer.ops.kv_cache import append_paged_kv_cache_, qk_norm_rope_append_
from fastinfer.ops.norm import (
    fused_add_layer_norm_,
    fused_add_rms_norm_,
    layer_norm,
    rms_norm,
)
from fastinfer.ops.packed_weights import (
    PackedWeight,
    concatenate_packed,
    pack_codes,
    packed_shape,
    quantize_weight,
    quantize_weight_with_outliers,
    unpack_codes,
)
from fastinfer.ops.quantize import quantize_fp8, quantize_int8, quantize_int8_asymmetric
from fastinfer.ops.repack import (
    repack_awq,
    repack_awq_gemv,
    repack_compressed_tensors,
    repack_gptq,
    to_awq,
    to_awq_gemv,
    to_compressed_tensors,
    to_gptq,
)
from fastinfer.ops.rotary import rotary_cos_sin, rotary_embedding_
from fastinfer.ops.sampling import sample
from fastinfer.ops.scaled_mm import fp8_scaled_mm, int8_scaled_mm
from fastinfer.ops.shared_prefix import plan_shared_prefix_attention, shared_prefix_attention

__all__ = [
    "Outliers",
    "PackedWeight",
    "append_paged_kv_cache_",
    "attention_plan_size",
    "backends",
    "concatenate_packed",
    "flash_attention",
    "flash_attention_varlen",
    "fp8_scaled_mm",
    "fused_add_layer_norm_",
    "fused_add_rms_norm_",
    "gelu_and_mul",
    "int2_gemm",
    "int3_gemm",
    "int4_gemm",
    "int8_gemm",
    "int8_scaled_mm",
    "layer_norm",
    "merge_attention_states",
    "op_families",
    "op_names",
    "pack_codes",
    "packed_shape",
    "paged_attention",
    "paged_attention_workspace_size",
    "plan_attention",
    "plan_shared_prefix_attention",
    "qk_norm_rope_append_",
    "quantize_fp8",
    "quantize_int8",
    "quantize_int8_asymmetric",
    "quantize_weight",
    "quantize_weight_with_outliers",
    "repack_awq",
    "repack_awq_gemv",
    "repack_compressed_tensors",
    "repack_gptq",
    "rms_norm",
    "rotary_cos_sin",
    "rotary_embedding_",
    "sample",
    "shared_prefix_attention",
    "silu_and_mul",
    "to_awq",
    "to_awq_gemv",
    "to_compressed_tensors",
    "to_gptq",
    "unpack_codes",
]
