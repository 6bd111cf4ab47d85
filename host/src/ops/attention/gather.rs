//! Keys and values in one piece and in q's type, for the kernels that take them in no other way: of as many sequences
//! at a time as a workspace of bounded size has room for.

use std::ops::Range;

use abi::ops::attention::GATHER_KEYS;

use super::dims::Checked;
use super::launch::{Loaded, blocks};
use super::{AttentionArgs, AttentionProblem, OP, Offsets, ScoreTensors, select};
use crate::device::Device;
use crate::error::Error;
use crate::ops::workspace::Workspace;
use crate::plan::Check;
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView};

/// What the workspace may take, if that is enough for one sequence.
const MOST_BYTES: usize = 1 << 30;
/// The same as a part of the card's memory.
const MEMORY_PART: usize = 64;

/// The kernel that brings them there, and the place.
#[derive(Debug)]
pub(super) struct Gather {
    kernel: Loaded,
    /// Keys and values of some sequences of the planned size.
    workspace: Workspace<2>,
}

/// Sequences that are gathered at a time, of a problem on a card with so much memory, 0 where that is unknown.
fn at_a_time(problem: &AttentionProblem, memory_bytes: usize) -> usize {
    let &AttentionProblem { batch, seq_kv, heads_kv, head_dim, head_dim_v, dtype, .. } = problem;
    let row_bytes = (head_dim + head_dim_v) * dtype.bytes();
    let most = if memory_bytes == 0 { MOST_BYTES } else { MOST_BYTES.min(memory_bytes / MEMORY_PART) };
    let sequence = seq_kv.saturating_mul(heads_kv).saturating_mul(row_bytes);
    (most / sequence.max(1)).clamp(1, batch.max(1))
}

impl Gather {
    pub(super) fn new(device: &Device, problem: &AttentionProblem) -> Result<Self, Error> {
        let &AttentionProblem { seq_kv, heads_kv, head_dim, head_dim_v, dtype, .. } = problem;
        let kernel = Loaded::new(device, select::gather(problem)?, 0)?;
        let sequences = at_a_time(problem, device.profile().memory_bytes);
        let workspace = Workspace::new(device, |stream| {
            let rows = sequences.saturating_mul(seq_kv).saturating_mul(heads_kv);
            // Zeros, as TMA brings whole boxes, also of keys beyond a sequence's.
            let tensor = |width| Tensor::zeros(stream, &[rows, width], dtype);
            Ok([tensor(head_dim)?, tensor(head_dim_v)?])
        })?;
        Ok(Gather { kernel, workspace })
    }

    /// Sequences of so many keys that there is room for at a time, at least one.
    pub(super) fn room(&self, seq_kv: usize, heads_kv: usize) -> usize {
        let rows = seq_kv * heads_kv;
        (self.workspace.tensors[0].shape()[0] / rows.max(1)).max(1)
    }

    /// A run in parts of as many sequences as there is room for: what they have is brought here, then `attend` is to
    /// start the kernel that takes it from here.
    pub(super) fn each(
        &self,
        stream: &Stream,
        args: &mut AttentionArgs<'_>,
        dims: Checked,
        attend: impl Fn(&AttentionArgs<'_>, Checked) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _alone = self.workspace.enter(stream)?;
        let sequences = dims.sequences as usize;
        let room = self.room(dims.seq_kv as usize, dims.heads_kv as usize);
        for first in (0..sequences).step_by(room) {
            let range = first..sequences.min(first + room);
            let dims = dims.of_sequences(range.len() as u32);
            let (args, dims) = self.run(stream, args.of_sequences(range)?, dims)?;
            attend(&args, dims)?;
        }
        Ok(())
    }

    /// Starts the kernel; the run with what it brings, in a workspace that nobody else has entered. There are no more
    /// sequences than there is room for.
    fn run<'a>(
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
        // the workspace has room for the sequences, or `slice` had failed; the grid covers exactly the keys of all of
        // them.
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

impl AttentionArgs<'_> {
    /// The same of these of its sequences only.
    fn of_sequences<'a>(&'a mut self, range: Range<usize>) -> Result<AttentionArgs<'a>, Error> {
        let AttentionArgs { q, k, v, kv_lens, offsets, kv_scales, out, lse, scores, page_table } =
            self.reborrow();
        let of = |view: TensorView<'a>| view.slice(0, range.clone());
        // Packed queries are one tensor, whose offsets say where these sequences' are, and so are pages.
        let (is_packed, is_paged) = (offsets.q.is_some(), page_table.is_some());
        let offsets_of = |view: TensorView<'a>| view.slice(0, range.start..range.end + 1);
        let mask_of = |view: TensorView<'a>| if view.shape()[0] == 1 { Ok(view) } else { of(view) };
        Ok(AttentionArgs {
            q: if is_packed { q } else { of(q)? },
            k: if is_paged { k } else { of(k)? },
            v: if is_paged { v } else { of(v)? },
            kv_lens: kv_lens.map(of).transpose()?,
            offsets: Offsets { q: offsets.q.map(offsets_of).transpose()?, kv: offsets.kv },
            kv_scales,
            out: if is_packed { out } else { out.slice(0, range.clone())? },
            lse: if is_packed { lse } else { lse.map(|lse| lse.slice(0, range.clone())).transpose()? },
            scores: ScoreTensors {
                sinks: scores.sinks,
                bias: scores.bias.map(mask_of).transpose()?,
                blocks: scores.blocks.map(mask_of).transpose()?,
            },
            page_table: page_table.map(of).transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use abi::DType;

    use super::*;

    #[test]
    fn as_many_as_there_is_room_for() {
        // 128 MiB a sequence.
        let problem = AttentionProblem {
            dtype_kv: DType::F8E4M3,
            ..AttentionProblem::new(64, [512, 32768], [32, 8], 128, DType::BF16)
        };
        assert_eq!(at_a_time(&problem, 141 << 30), 8, "1 GiB");
        assert_eq!(at_a_time(&problem, 0), 8, "1 GiB");
        assert_eq!(at_a_time(&problem, 24 << 30), 3, "a 64th of the card's");
        assert_eq!(at_a_time(&problem, 1 << 30), 1, "not less than one");
        assert_eq!(
            at_a_time(&AttentionProblem { batch: 5, ..problem }, 141 << 30),
            5,
            "no more than there are"
        );
        assert_eq!(at_a_time(&AttentionProblem { seq_kv: 0, ..problem }, 0), 64);
        assert_eq!(at_a_time(&AttentionProblem { batch: 0, ..problem }, 0), 1);
    }
}
