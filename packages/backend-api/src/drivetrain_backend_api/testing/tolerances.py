"""How far a backend may be from the reference, and why that far. Not the backend's to choose."""

from drivetrain_backend_api.testing.claims import Tolerance

FP32 = Tolerance(value=1e-5, why="fp32 sums in another order than the reference's; relative where above 1")
FP32_WEIGHTS = Tolerance(
    value=1e-5, why="fp32 sums in another order; relative to each weight's norm, after several optimizer steps"
)
GRAD_NORM = Tolerance(value=1e-5, why="fp32 gradients summed in another order; relative, below 0.001 to that")
LEARNING_RATE = Tolerance(value=1e-12, why="the schedule is computed in float64 on both sides")
BETWEEN_LAYOUTS = Tolerance(value=1e-5, why="the same sums in another order in fp32; relative to each weight's norm")
ROUTING_GAP = 1e-4
"""What the reference's choice of experts must be clear by: a hundred times what fp32 sums in another order are off."""

FIRST_STEP = Tolerance(value=1e-6, why="the same weights, packing and kernels, with and without gradients")
LOW_PRECISION = {
    "bf16": Tolerance(value=0.03, why="bf16 keeps 8 bits of each activation; relative where above 1"),
    "fp16": Tolerance(value=0.004, why="fp16 keeps 11 bits of each activation; relative where above 1"),
}
LOW_PRECISION_UPDATE = {
    "bf16": Tolerance(
        value=0.2,
        why="bf16 gradients carry 8 bits and Adam divides by their size; weights kept in bf16 would lose the update",
    ),
    "fp16": Tolerance(
        value=0.03,
        why="fp16 gradients carry 11 bits and Adam divides by their size; unscaled ones would underflow to zero",
    ),
}
TENSOR_BYTES = Tolerance(value=0.0, why="every cycle ends with the tensors it began with")
HANDLES = Tolerance(value=0.0, why="every cycle ends with the open files and threads it began with")
RESIDENT_BYTES = Tolerance(value=8 * 2**20, why="the allocator's own arenas; bytes of resident memory over ten cycles")
RAISED_SECONDS = Tolerance(value=30.0, why="seconds until every other rank has ended too, far below the deadline")
