"""What every op computes, in plain PyTorch: the specification that each kernel is tested against.

A function here has its op's name and options, reads its inputs and never changes them: what an op
does in place is returned as fresh tensors. All arithmetic is done in `dtype`, float64 unless told
otherwise. Called with the inputs' own dtype, the same code is the plain eager PyTorch version of
the op, whose error against float64 is the yardstick for a kernel's (`helpers.assert_accurate`).
"""

from tests.reference.attention import (
    attend,
    flash_attention,
    flash_attention_varlen,
    merge_attention_states,
    paged_attention,
    popcount,
    read_pages,
    visible_keys,
    weighted_sum,
)
from tests.reference.epilogue import epilogue
from tests.reference.kv_cache import (
    append_paged_kv_cache_,
    qk_norm_rope_append_,
    quantize_rows,
)
from tests.reference.low_bit_gemm import (
    dequantized,
    low_bit_gemm,
    pack_codes,
    unpack_codes,
)
from tests.reference.norm import (
    add_to_residual,
    fused_add_layer_norm_,
    fused_add_rms_norm_,
    gelu_and_mul,
    layer_norm,
    rms_norm,
    silu_and_mul,
)
from tests.reference.quantize import (
    quantize_fp8,
    quantize_int8,
    quantize_int8_asymmetric,
)
from tests.reference.rotary import (
    rotary_cos_sin,
    rotary_embedding_,
    rotary_pairs,
)
from tests.reference.sampling import (
    Sampled,
    gumbel_noise,
    kept_tokens,
    philox4x32,
    random_words,
    sample,
)
from tests.reference.scaled_mm import (
    fp8_scaled_mm,
    int8_scaled_mm,
    int8_sums,
)

__all__ = [
    "Sampled",
    "add_to_residual",
    "append_paged_kv_cache_",
    "attend",
    "dequantized",
    "epilogue",
    "flash_attention",
    "flash_attention_varlen",
    "fp8_scaled_mm",
    "fused_add_layer_norm_",
    "fused_add_rms_norm_",
    "gelu_and_mul",
    "gumbel_noise",
    "int8_scaled_mm",
    "int8_sums",
    "kept_tokens",
    "layer_norm",
    "low_bit_gemm",
    "merge_attention_states",
    "pack_codes",
    "paged_attention",
    "philox4x32",
    "popcount",
    "qk_norm_rope_append_",
    "quantize_fp8",
    "quantize_int8",
    "quantize_int8_asymmetric",
    "quantize_rows",
    "random_words",
    "read_pages",
    "rms_norm",
    "rotary_cos_sin",
    "rotary_embedding_",
    "rotary_pairs",
    "sample",
    "silu_and_mul",
    "unpack_codes",
    "visible_keys",
    "weighted_sum",
]
