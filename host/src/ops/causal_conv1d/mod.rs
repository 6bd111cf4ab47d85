//! Causal depthwise convolution over time: `abi::ops::causal_conv1d` has the kernel table, `gpu/src/ops/causal_conv1d` the
//! kernels, `tests/ops/causal_conv1d.rs` the properties, `benches/ops/causal_conv1d.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::causal_conv1d::{CausalConv1dDims, MAX_WIDTH, THREADS, TOKENS};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::{check_blocks, check_size};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::causal_conv1d::{CausalConv1dTile, CausalConv1dVariant, VARIANTS};
pub use cases::{CASES, CausalConv1dCase};
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

/// The tensors of a run. Stride 1 in the last dimension.
#[derive(Debug)]
pub struct CausalConv1dArgs<'a> {
    /// `[tokens, channels]`: the sequences' tokens, one sequence after the other.
    pub x: TensorView<'a>,
    /// `[channels, width]`, contiguous; the last tap is the token's own.
    pub weight: TensorView<'a>,
    /// `[channels]`, if there.
    pub bias: Option<TensorView<'a>>,
    /// `[sequences + 1]` u32: sequence s has the tokens `offsets[s]..offsets[s + 1]`. They do not fall, and are at most the
    /// number of tokens; a token in none of them is left out.
    pub offsets: TensorView<'a>,
    /// `[sequences]` u32: where each sequence's state is. Distinct; a sequence whose slot is beyond the state is skipped.
    pub slots: TensorView<'a>,
    /// `[slots, channels, width − 1]`, the last two dimensions contiguous: the last inputs of each sequence, the newest
    /// last. Read and brought up to date; zeros before a sequence's first token.
    pub state: TensorViewMut<'a>,
    /// `[tokens, channels]`.
    pub out: TensorViewMut<'a>,
}

/// Causal depthwise convolution over time with SiLU, over packed sequences, continued from a state.
///
/// `out[t, c] = silu(Σ_j weight[c, j] · x[t − width + 1 + j, c] (+ bias[c]))`, where x before a sequence's first token is its
/// state. The state becomes the last `width − 1` inputs, so that any cut of a sequence into runs gives the same bits.
///
/// **Arithmetic**: f32, out rounded once; the state holds the inputs as they are, before weights and activation.
/// **Determinism**: bitwise the same from run to run; a sequence's result does not depend on the other sequences, nor on how
/// it is cut into runs.
/// **Aliasing**: out and state may not overlap the other tensors.
/// **Graphs**: offsets and slots are read when the kernel runs.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
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
pub struct CausalConv1d {
    device: Device,
    problem: CausalConv1dProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to 16 bytes.
    Cuda {
        variant: &'static CausalConv1dVariant,
        entry: Entry,
        unaligned: Entry,
    },
}

impl CausalConv1d {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &CausalConv1dProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: CausalConv1dProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let variant = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, variant)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: CausalConv1dProblem,
        variant: &'static CausalConv1dVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        select::check_fits(variant, &problem)?;
        Self::new(device, problem, device.limits().map(|_| variant))
    }

    fn new(
        device: &Device,
        problem: CausalConv1dProblem,
        variant: Option<&'static CausalConv1dVariant>,
    ) -> Result<Self, Error> {
        let backend = match variant {
            None => Backend::Cpu,
            Some(variant) => {
                let entry = device.entry(OP, variant.entry, 0)?;
                let unaligned = device.entry(OP, select::scalar(problem.dtype)?.entry, 0)?;
                Backend::Cuda { variant, entry, unaligned }
            }
        };
        Ok(CausalConv1d { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`CausalConv1d`].
    pub fn run(&self, stream: &Stream, mut args: CausalConv1dArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let mut dims = self.check(&args)?;
        if dims.sequences == 0 {
            return Ok(());
        }
        match &self.backend {
            Backend::Cpu => cpu::run(self.problem.dtype, &dims, &mut args),
            Backend::Cuda { variant, entry, unaligned } => {
                let CausalConv1dArgs { x, weight, bias, offsets, slots, state, out } = &args;
                let per_16 = 16 / self.problem.dtype.bytes();
                // Weights and state are read by channels, whose pieces begin wherever x's do.
                let aligned = x.is_aligned_16()
                    && out.is_aligned_16()
                    && weight.address().is_multiple_of(16)
                    && bias.is_none_or(|bias| bias.is_aligned_16())
                    && state.address().is_multiple_of(16)
                    && (dims.num_slots <= 1 || (dims.slot_stride as usize).is_multiple_of(per_16));
                let pieces = matches!(variant.tile, CausalConv1dTile::Pieces { .. }) && aligned;
                let (entry, per_thread) = if pieces { (entry, per_16 as u32) } else { (unaligned, 1) };
                dims.channel_blocks = dims.channels.div_ceil(THREADS * per_thread);
                let places = u64::from(dims.tokens / TOKENS) + u64::from(dims.sequences);
                let grid = check_blocks(OP, "x", places * u64::from(dims.channel_blocks))?;
                let params = [
                    (*x).into(),
                    (*weight).into(),
                    bias.map_or(Param::Address(0), Param::from),
                    (*offsets).into(),
                    (*slots).into(),
                    state.into(),
                    out.into(),
                    (&dims).into(),
                ];
                // SAFETY: `check` found every row of every tensor inside its view, and `aligned` what is read in pieces of 16
                // bytes; the kernel takes no token beyond them and leaves out slots beyond the state.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    fn check(&self, args: &CausalConv1dArgs<'_>) -> Result<CausalConv1dDims, Error> {
        let CausalConv1dArgs { x, weight, bias, offsets, slots, state, out } = args;
        let CausalConv1dProblem { tokens: max_tokens, sequences: max_sequences, channels, width, dtype } =
            self.problem;
        let device = &self.device;
        x.expect(OP, "x", device, dtype, &[None, Some(channels)])?;
        let tokens = x.shape()[0];
        weight.expect(OP, "weight", device, dtype, &[Some(channels), Some(width)])?;
        if let Some(bias) = bias {
            bias.expect(OP, "bias", device, dtype, &[Some(channels)])?;
            bias.expect_inner_contiguous(OP, "bias")?;
        }
        slots.expect(OP, "slots", device, DType::U32, &[None])?;
        let sequences = slots.shape()[0];
        offsets.expect(OP, "offsets", device, DType::U32, &[Some(sequences + 1)])?;
        state.expect(OP, "state", device, dtype, &[None, Some(channels), Some(width - 1)])?;
        out.expect(OP, "out", device, dtype, &[Some(tokens), Some(channels)])?;
        x.expect_inner_contiguous(OP, "x")?;
        offsets.expect_inner_contiguous(OP, "offsets")?;
        slots.expect_inner_contiguous(OP, "slots")?;
        out.expect_inner_contiguous(OP, "out")?;
        if !weight.is_contiguous() {
            return Err(Error::invalid(
                OP,
                "weight",
                "a contiguous tensor",
                format!("{:?}", weight.strides()),
            ));
        }
        let num_slots = state.shape()[0];
        // The stride of a single element is of no account.
        let inner = std::iter::zip(&state.shape()[1..], &state.strides()[1..]);
        if !std::iter::zip(inner, [width - 1, 1])
            .all(|((&size, &stride), whole)| size <= 1 || stride == whole)
        {
            let expected = format!("strides [any, {}, 1]", width - 1);
            return Err(Error::invalid(OP, "state", expected, format!("{:?}", state.strides())));
        }
        for (argument, what, got, most) in
            [("x", "tokens", tokens, max_tokens), ("slots", "sequences", sequences, max_sequences)]
        {
            if got > most {
                let expected = format!("at most {most} {what}, as planned");
                return Err(Error::invalid(OP, argument, expected, got.to_string()));
            }
        }
        Ok(CausalConv1dDims {
            tokens: tokens as u32,
            sequences: sequences as u32,
            num_slots: check_size(OP, "state", "number of slots", num_slots)?,
            channels: channels as u32,
            width: width as u32,
            channel_blocks: 1,
            x_stride: check_size(OP, "x", "stride", x.strides()[0])?,
            out_stride: check_size(OP, "out", "stride", out.strides()[0])?,
            slot_stride: check_size(OP, "state", "stride", state.strides()[0])?,
        })
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let CausalConv1dProblem { tokens, sequences, channels, width, dtype } = self.problem;
        let (entry, tile) = match &self.backend {
            Backend::Cpu => (None, "sequences".into()),
            Backend::Cuda { variant, entry, .. } => (Some(entry), format!("{:?}", variant.tile)),
        };
        let [tokens, sequences, channels, width] = [tokens, sequences, channels, width].map(count);
        let states = count(2) * sequences * channels * (width - count(1));
        let elements = count(2) * tokens * channels + channels * width + states;
        let work = Work {
            problem: format!("[{tokens}, {channels}] {dtype}, {width} taps, {sequences} sequences"),
            why: "by the taps and whether the channels are whole pieces of 16 bytes".into(),
            tile,
            threads: THREADS,
            bytes: elements * count(dtype.bytes()),
            flops: count(2) * tokens * channels * width,
        };
        OptimizationReport::new(OP, &self.device, entry, work)
    }
}

impl Kernel for CausalConv1d {
    type Args<'a> = CausalConv1dArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: CausalConv1dArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &CausalConv1dProblem) -> Result<(), Error> {
    let CausalConv1dProblem { tokens, sequences, channels, width, dtype } = *problem;
    check_size(OP, "problem", "tokens", tokens)?;
    check_size(OP, "problem", "sequences", sequences)?;
    if channels == 0 || channels >= 1 << 28 {
        return Err(Error::invalid(
            OP,
            "problem",
            "channels at least 1 and below 2^28",
            channels.to_string(),
        ));
    }
    if !(2..=MAX_WIDTH as usize).contains(&width) {
        return Err(Error::invalid(OP, "problem", "2 to 4 taps", width.to_string()));
    }
    if !dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()));
    }
    Ok(())
}
