"""fastinfer inside other packages' models; each module here imports the package that it is for.

import fastinfer.integrations.transformers   # attn_implementation="fastinfer"
"""
