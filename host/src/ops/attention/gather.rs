//! Keys and values in one piece and in q's type, for the kernels that take them in no other way.

use abi::ops::attention::GATHER_KEYS;

use super::dims::Checked;
use super::launch::{Loaded, blocks};
use super::{AttentionArgs, AttentionProblem, OP, select};
use crate::device::Device;
use crate::error::Error;
use crate::ops::workspace::Workspace;
use crate::plan::Check;
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView};

/// The kernel that brings them there, and the place.
#[derive(Debug)]
pub(super) struct Gather {
    kernel: Loaded,
    /// Keys and values of the planned sizes.
    pub(super) workspace: Workspace<2>,
}

impl Gather {
    pub(super) fn new(device: &Device, problem: &AttentionProblem) -> Result<Self, Error> {
        let &AttentionProblem { batch, seq_kv, heads_kv, head_dim, head_dim_v, dtype, .. } = problem;
        let kernel = Loaded::new(device, select::gather(problem)?, 0)?;
        let workspace = Workspace::new(device, |stream| {
            let rows = batch.saturating_mul(seq_kv).saturating_mul(heads_kv);
            // Zeros, as TMA brings whole boxes, also of keys beyond a sequence's.
            let tensor = |width| Tensor::zeros(stream, &[rows, width], dtype);
            Ok([tensor(head_dim)?, tensor(head_dim_v)?])
        })?;
        Ok(Gather { kernel, workspace })
    }

    /// Starts the kernel; the run with what it brings, in a workspace that nobody else has entered.
    pub(super) fn run<'a>(
        &'a self,
        stream: &Stream,
        args: AttentionArgs<'a>,
        dims: Checked,
    ) -> Result<(AttentionArgs<'a>, Checked), Error> {
        let [batch, seq_kv, heads_kv] =
            [dims.sequences, dims.seq_kv, dims.heads_kv].map(|size| size as usize);
        let part = |tensor: &'a Tensor, width| -> Result<TensorView<'a>, Error> {
            tensor.view().slice(0, 0..batch * seq_kv * heads_kv)?.reshape(&[
                batch,
                seq_kv,
                heads_kv,
                width as usize,
            ])
        };
        let [k_rows, v_rows] = &self.workspace.tensors;
        let (k, v) = (part(k_rows, dims.head_dim)?, part(v_rows, dims.head_dim_v)?);
        let params = [
            args.k.into(),
            args.v.into(),
            args.kv_scales.k.into(),
            args.kv_scales.v.into(),
            args.kv_lens.into(),
            args.page_table.into(),
            k.into(),
            v.into(),
            dims.for_gather().into(),
        ];
        let grid = blocks(&[dims.sequences, dims.seq_kv.div_ceil(GATHER_KEYS)])?;
        // SAFETY: `check` found every row of the tensors inside its view, and `run` that all are aligned to 16 bytes;
        // the workspace has room for the planned sizes, which the run's do not exceed; the grid covers exactly the keys
        // of all sequences.
        unsafe {
            self.kernel.entry.launch(
                stream,
                [grid, 1, 1],
                [self.kernel.variant.tile.threads(), 1, 1],
                &params,
            )?;
        }
        let at = Check::new(OP, stream.device());
        let k_strides = at.strided("k", k, k.dtype(), &[None; 4])?;
        let v_strides = at.strided("v", v, v.dtype(), &[None; 4])?;
        Ok((AttentionArgs { k, v, page_table: None, ..args }, dims.gathered(k_strides, v_strides)))
    }
}
