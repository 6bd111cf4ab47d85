//! Rows that become fp8 before they are multiplied.

use std::sync::MutexGuard;

use abi::DType;
use abi::matmul_fp8::{BLOCK_K, QuantiseDims};
use abi::ops::grouped_matmul::QUANTISE_VARIANTS;
use abi::ops::matmul::{THREADS, WARPS};

use crate::device::Device;
use crate::error::Error;
use crate::launch::Entry;
use crate::ops::grouped_matmul;
use crate::ops::workspace::Workspace;
use crate::param::Param;
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView};

/// The kernel that makes rows fp8, and room for them.
#[derive(Debug)]
pub(crate) struct Fp8Rows {
    quantise: Entry,
    /// `[rows, k]` e4m3, k rounded up to whole blocks, and `[blocks, rows]` f32.
    workspace: Workspace<2>,
}

/// Rows as they have become.
pub(crate) struct QuantisedRows<'a> {
    /// `[rows, k]` e4m3.
    pub(crate) q: TensorView<'a>,
    /// `[blocks of k, rows]` f32.
    pub(crate) scales: TensorView<'a>,
    /// From one row to the next, and its k.
    pub(crate) stride: u32,
    /// Nobody else's run overwrites them before this is dropped.
    _alone: MutexGuard<'a, Option<Stream>>,
}

impl Fp8Rows {
    /// For so many rows of k elements at most.
    pub(crate) fn new(
        op: &'static str,
        device: &Device,
        [rows, k]: [usize; 2],
        dtype: DType,
    ) -> Result<Self, Error> {
        let blocks = k.div_ceil(BLOCK_K as usize);
        let workspace = Workspace::new(device, |stream| {
            let q = Tensor::empty(stream, &[rows, blocks * BLOCK_K as usize], DType::F8E4M3)?;
            Ok([q, Tensor::empty(stream, &[blocks, rows], DType::F32)?])
        })?;
        let quantise = QUANTISE_VARIANTS.iter().find(|quantise| quantise.dtype == dtype);
        let quantise = quantise
            .ok_or_else(|| Error::invalid(op, "problem", "a type that can be made fp8", dtype.name()))?;
        // In the image of the operator that had it first.
        Ok(Fp8Rows { quantise: device.entry(grouped_matmul::OP, quantise.entry, 0)?, workspace })
    }

    /// Makes rows of x fp8: `dims.rows` of them, no more than planned, whose `q_stride` is set here.
    ///
    /// # Safety
    /// - x has `dims.x_rows` rows of `dims.k` elements, `dims.x_stride` apart, in pieces of 16 bytes; the order a
    ///   number   for each row if `dims.fan_out` is not 0.
    pub(crate) unsafe fn make(
        &self,
        stream: &Stream,
        (x, order): (TensorView<'_>, Param<'_>),
        dims: QuantiseDims,
    ) -> Result<QuantisedRows<'_>, Error> {
        let [q, scales] = &self.workspace.tensors;
        let _alone = self.workspace.enter(stream)?;
        let stride = dims.k.next_multiple_of(BLOCK_K);
        let dims = QuantiseDims { q_stride: stride, ..dims };
        let params = [x.into(), order, q.view().into(), scales.view().into(), (&dims).into()];
        // A warp has two blocks of k.
        let num_sms = stream.device().profile().num_sms.max(1);
        let warps = u64::from(dims.rows) * u64::from((stride / BLOCK_K).div_ceil(2));
        let blocks = warps.div_ceil(WARPS.into()).min(8 * u64::from(num_sms)) as u32;
        // SAFETY: the caller's promise; the workspace has room for as many rows as were planned, and nobody else has
        // entered it.
        unsafe { self.quantise.launch(stream, [blocks, 1, 1], [THREADS, 1, 1], &params)? };
        Ok(QuantisedRows { q: q.view(), scales: scales.view(), stride, _alone })
    }
}
