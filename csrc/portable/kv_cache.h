#pragma once

#include "../torch_utils.h"

namespace fastinfer::portable {

void append_paged_kv_cache_(const Tensor& k, const Tensor& v, const Tensor& k_cache,
                            const Tensor& v_cache, const Tensor& slot_mapping,
                            const std::optional<Tensor>& k_scale,
                            const std::optional<Tensor>& v_scale);

void qk_norm_rope_append_(const Tensor& qkv, const Tensor& q_out, const Tensor& k_cache,
                          const Tensor& v_cache, const Tensor& slot_mapping,
                          const std::optional<Tensor>& positions,
                          const std::optional<Tensor>& cos_sin, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& q_weight,
                          const std::optional<Tensor>& k_weight, double eps, double weight_offset,
                          bool interleaved, const std::optional<Tensor>& k_scale,
                          const std::optional<Tensor>& v_scale);

}  // namespace fastinfer::portable
