"""What the PyTorch peers with Adam do alike: a step of stacked modules, mapped.

As the tutorial "Model ensembling" has it: the states of K modules are stacked, and
``torch.func.vmap`` maps one ``grad_and_value`` over them, a batch for each; one
``torch.optim.Adam(fused=True)`` updates the stacked tensors, which is each member's own
Adam, as it is elementwise.
"""

import copy

import torch
from torch.func import functional_call, grad_and_value, stack_module_state, vmap


def make_step(models, loss_of, learning_rate):
    """Return the step of batches [K, B, ...] that returns each member's loss."""
    params, _ = stack_module_state(models)
    optimizer = torch.optim.Adam(params.values(), learning_rate, fused=True)
    skeleton = copy.deepcopy(models[0]).to("meta")

    def loss_fn(params, x, y):
        return loss_of(functional_call(skeleton, params, (x,)), y)

    grads_and_losses = vmap(grad_and_value(loss_fn))

    def step(x, y):
        detached = {name: param.detach() for name, param in params.items()}
        grads, losses = grads_and_losses(detached, x, y)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        return losses

    return step
