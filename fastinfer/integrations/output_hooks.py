"""transformers' hooks for `output_hidden_states` and `output_attentions`."""

from __future__ import annotations

from torch import nn

_INSTALLED = "_output_capturing_hooks_installed"
_HOOK = ("transformers.utils.output_capturing", "output_capturing_hook")


def remove_output_hooks(model: nn.Module) -> None:
    """Takes the hooks off that transformers left on layers when such outputs were asked for.

    It puts them on once, on the layers that there are then, and again when it finds none. So they
    must go when layers are exchanged: the new ones would have none.
    """
    for module in model.modules():
        vars(module).pop(_INSTALLED, None)
        for key, hook in list(module._forward_hooks.items()):
            if (getattr(hook, "__module__", None), getattr(hook, "__name__", None)) == _HOOK:
                del module._forward_hooks[key]
