"""Functions that run Triton kernels, for `path.load_kernels`."""

from realrl.model.gpu.activation import Activate as Activate
from realrl.model.gpu.grouped_gradient import add_grouped_gradient as add_grouped_gradient
from realrl.model.gpu.norm import AddRMSNorm as AddRMSNorm
from realrl.model.gpu.norm import RMSNorm as RMSNorm
from realrl.model.gpu.nucleus import keep_top_p_on_gpu as keep_top_p_on_gpu
from realrl.model.gpu.rotary import RotateHeads as RotateHeads
from realrl.model.gpu.swiglu import SwiGLU as SwiGLU
