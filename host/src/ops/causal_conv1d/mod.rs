//! Causal depthwise convolution over time, continued from a state: [`CausalConv1d`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::causal_conv1d::{CausalConv1dDims, MAX_WIDTH, THREADS, TOKENS};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::check_blocks;
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::causal_conv1d::{CausalConv1dTile, CausalConv1dVariant, VARIANTS};
pub use cases::{CASES, CausalConv1dCase, samples};
pub use select::select;

const OP: &str = "causal_conv1d";

/// What is to be convolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CausalConv1dProblem {
    /// Most tokens of a run, over all sequences.
    pub tokens: usize,
    /// Most sequences of a run.
    pub sequences: usize,
    /// Channels.
    pub channels: usize,
    /// Taps of a channel, the token itself included: 2 to 4.
    pub width: usize,
    /// Type of all tensors but offsets and slots.
    pub dtype: DType,
}

impl CausalConv1dProblem {
    /// With what it must have, which is all there is so far.
    pub fn new(tokens: usize, sequences: usize, channels: usize, width: usize, dtype: DType) -> Self {
        CausalConv1dProblem { tokens, sequences, channels, width, dtype }
    }
}

/// The tensors of a run. Stride 1 in the last dimension.
#[derive(Debug)]
pub struct CausalConv1dArgs<'a> {
    /// `[tokens, channels]`: the sequences' tokens, one sequence after the other.
    pub x: TensorView<'a>,
    /// `[channels, width]`, contiguous; the last tap is the token's own.
    pub weight: TensorView<'a>,
    /// `[channels]`, if there.
    pub bias: Option<TensorView<'a>>,
    /// `[sequences + 1]` u32: sequence s has the tokens `offsets[s]..offsets[s + 1]`. They do not fall, and are at most
    /// the number of tokens; a token in none of them is left out.
    pub offsets: TensorView<'a>,
    /// `[sequences]` u32: where each sequence's state is. Distinct; a sequence whose slot is beyond the state is
    /// skipped.
    pub slots: TensorView<'a>,
    /// `[slots, channels, width − 1]`, the last two dimensions contiguous: the last inputs of each sequence, the newest
    /// last. Read and brought up to date; zeros before a sequence's first token.
    pub state: TensorViewMut<'a>,
    /// `[tokens, channels]`.
    pub out: TensorViewMut<'a>,
}

impl<'a> CausalConv1dArgs<'a> {
    /// With what it must have. The other fields do nothing: `bias: None`.
    pub fn new(
        x: TensorView<'a>,
        weight: TensorView<'a>,
        offsets: TensorView<'a>,
        slots: TensorView<'a>,
        state: TensorViewMut<'a>,
        out: TensorViewMut<'a>,
    ) -> Self {
        CausalConv1dArgs { x, weight, bias: None, offsets, slots, state, out }
    }
}

/// Causal depthwise convolution over time with SiLU, over packed sequences, continued from a state.
///
/// `out[t, c] = silu(Σ_j weight[c, j] · x[t − width + 1 + j, c] (+ bias[c]))`, where x before a sequence's first token
/// is its state. The state becomes the last `width − 1` inputs, so that any cut of a sequence into runs gives the same
/// bits.
///
/// **Arithmetic**: f32, out rounded once; the state holds the inputs as they are, before weights and activation. Where
/// the sizes of a sum's terms add up to more than 3.4e38, out may be infinite or NaN. **Determinism**: bitwise the same
/// from run to run; a sequence's result does not depend on the other sequences, nor on how it is cut into runs.
/// **Aliasing**: out and state may not overlap the other tensors. **Graphs**: offsets and slots are read when the
/// kernel runs. **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work
/// was enqueued. **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
/// **Source**: Gu and Dao, *Mamba* (2023), section 3.4; as in Yang et al., *Gated Delta Networks* (2024), section 3.4.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::causal_conv1d::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem =
///     CausalConv1dProblem { tokens: 16, sequences: 2, channels: 8192, width: 4, dtype: DType::BF16 };
/// let conv = CausalConv1d::plan(&device, problem)?;
/// let x = Tensor::zeros(&stream, &[16, 8192], DType::BF16)?;
/// let weight = Tensor::zeros(&stream, &[8192, 4], DType::BF16)?;
/// let offsets = Tensor::from_slice(&stream, &[3], &[0u32, 10, 16])?;
/// let slots = Tensor::from_slice(&stream, &[2], &[0u32, 1])?;
/// let mut state = Tensor::zeros(&stream, &[2, 8192, 3], DType::BF16)?;
/// let mut out = Tensor::empty(&stream, &[16, 8192], DType::BF16)?;
/// let args = CausalConv1dArgs {
///     x: x.view(), weight: weight.view(), bias: None, offsets: offsets.view(), slots: slots.view(),
///     state: state.view_mut(), out: out.view_mut(),
/// };
/// conv.run(&stream, args)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CausalConv1d(Plan<Self>);

planned!(
    CausalConv1d,
    CausalConv1dProblem,
    CausalConv1dArgs { x, weight, bias, offsets, slots, state, out },
    &'static CausalConv1dVariant
);

impl Operator for CausalConv1d {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "sequences";
    type Problem = CausalConv1dProblem;
    type Args<'a> = CausalConv1dArgs<'a>;
    type Dims = CausalConv1dDims;
    type Variant = &'static CausalConv1dVariant;
    type Kernels = Pair;

    fn check_problem(problem: &CausalConv1dProblem) -> Result<(), Error> {
        let CausalConv1dProblem { tokens, sequences, channels, width, dtype } = *problem;
        if channels == 0 || channels >= 1 << 28 {
            let expected = "channels at least 1 and below 2^28";
            return Err(Error::invalid(OP, "problem", expected, channels.to_string()));
        }
        if !(2..=MAX_WIDTH as usize).contains(&width) {
            return Err(Error::invalid(OP, "problem", "2 to 4 taps", width.to_string()));
        }
        check_floats(OP, dtype, &[("tokens", tokens), ("sequences", sequences)])
    }

    fn select(limits: &DeviceLimits, problem: &CausalConv1dProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &CausalConv1dProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(
        device: &Device,
        problem: &CausalConv1dProblem,
        choice: &Choice<Self::Variant>,
    ) -> Result<Pair, Error> {
        Pair::load(device, OP, [choice.variant.entry, select::scalar(problem.dtype)?.entry], 0)
    }

    fn check(
        at: &Check<'_>,
        problem: &CausalConv1dProblem,
        args: &CausalConv1dArgs<'_>,
    ) -> Result<CausalConv1dDims, Error> {
        let CausalConv1dArgs { x, weight, bias, offsets, slots, state, out } = args;
        let CausalConv1dProblem { channels, width, dtype, .. } = *problem;
        let [x_stride] = at.rows("x", *x, dtype, &[None, Some(channels)])?;
        let tokens = x.shape()[0];
        // Weights and state are read by channels, whose pieces begin wherever x's do.
        at.block("weight", *weight, dtype, &[channels, width].map(Some))?;
        if let Some(bias) = bias {
            let [] = at.rows("bias", *bias, dtype, &[Some(channels)])?;
        }
        let [] = at.elements("slots", *slots, DType::U32, &[None])?;
        let sequences = slots.shape()[0];
        let [] = at.elements("offsets", *offsets, DType::U32, &[Some(sequences + 1)])?;
        let state_shape = [None, Some(channels), Some(width - 1)];
        let slot_stride = at.stack("state", state.as_view(), dtype, &state_shape)?;
        let [out_stride] = at.rows("out", out.as_view(), dtype, &[tokens, channels].map(Some))?;
        Ok(CausalConv1dDims {
            tokens: at.planned("x", "tokens", tokens, problem.tokens)?,
            sequences: at.planned("slots", "sequences", sequences, problem.sequences)?,
            num_slots: at.size("state", "number of slots", state.shape()[0])?,
            channels: channels as u32,
            width: width as u32,
            channel_blocks: 1,
            x_stride,
            out_stride,
            slot_stride,
        })
    }

    fn cpu(problem: &CausalConv1dProblem, dims: &CausalConv1dDims, args: &mut CausalConv1dArgs<'_>) {
        cpu::run(problem.dtype, dims, args);
    }

    fn launch(
        run: &Run<'_, Self>,
        mut dims: CausalConv1dDims,
        args: &CausalConv1dArgs<'_>,
    ) -> Result<(), Error> {
        if dims.sequences == 0 {
            return Ok(());
        }
        let CausalConv1dArgs { x, weight, bias, offsets, slots, state, out } = args;
        let in_pieces = run.is_aligned && matches!(run.choice.variant.tile, CausalConv1dTile::Pieces { .. });
        let per_thread = if in_pieces { 16 / run.problem.dtype.bytes() as u32 } else { 1 };
        dims.channel_blocks = dims.channels.div_ceil(THREADS * per_thread);
        let places = u64::from(dims.tokens / TOKENS) + u64::from(dims.sequences);
        let grid = check_blocks(OP, "x", places * u64::from(dims.channel_blocks))?;
        let params = [
            (*x).into(),
            (*weight).into(),
            (*bias).into(),
            (*offsets).into(),
            (*slots).into(),
            state.into(),
            out.into(),
            (&dims).into(),
        ];
        let entry = run.kernels.fitting(in_pieces);
        // SAFETY: `check` found every row of every tensor inside its view, and `is_aligned` what is read in pieces of
        // 16 bytes; the kernel takes no token beyond them and leaves out slots beyond the state.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    fn work(problem: &CausalConv1dProblem) -> Work {
        let CausalConv1dProblem { tokens, sequences, channels, width, dtype } = *problem;
        let [tokens, sequences, channels, width] = [tokens, sequences, channels, width].map(count);
        let states = count(2) * sequences * channels * (width - count(1));
        let elements = count(2) * tokens * channels + channels * width + states;
        Work {
            problem: format!("[{tokens}, {channels}] {dtype}, {width} taps, {sequences} sequences"),
            bytes: elements * count(dtype.bytes()),
            flops: count(2) * tokens * channels * width,
        }
    }

    fn tile(_: &Device, _: &CausalConv1dProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}
