// The leading dimensions of an argument as rows.
#pragma once

#include "../rows.h"
#include "../torch_utils.h"

namespace fastinfer {

inline Rows rows_of(const Arg& arg) {
  Rows rows;
  FI_CHECK(make_rows(arg.sizes, arg.strides, arg.rank - 1, &rows), arg.op, arg.name,
           ": expected at most ", kMaxRowDims,
           " leading dimensions that cannot be merged, got shape ", shape_text(arg));
  return rows;
}

}  // namespace fastinfer
