//! How each kind of kernel is launched.

use abi::DType;
use abi::ops::attention::{
    AttentionDims, AttentionTile, AttentionVariant, MAX_KEY_PARTS_LOG2, decode_ring_group_bytes,
    decode_ring_joins,
};

use super::dims::{Checked, Decode};
use super::{AttentionArgs, AttentionProblem, OP, Planned, select};
use crate::device::Device;
use crate::error::Error;
use crate::launch::{Entry, Param};
use crate::ops::check_size;
use crate::ops::workspace::Workspace;
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView};
use crate::tensor_map::{Axis, Swizzle, TensorMap, Tiled};

#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) variant: &'static AttentionVariant,
    pub(super) entry: Entry,
    /// Blocks that the card holds at a time, where they are persistent; else as many as there may be.
    pub(super) places: u32,
    /// Whether a block can join the splits of a group: it has the shared memory, or the registers.
    pub(super) joins: bool,
}

impl Loaded {
    /// For so many rows of a decode kernel's block, at most.
    pub(super) fn new(device: &Device, variant: &'static AttentionVariant, rows: u32) -> Result<Self, Error> {
        let smem_bytes = variant.tile.smem_bytes();
        let load = |smem_bytes| device.entry(OP, variant.entry, smem_bytes);
        let (most, joined_bytes) = match variant.tile {
            AttentionTile::DecodeRing { dim, rows: most, blocks, .. } if decode_ring_joins(dim) => {
                (blocks, decode_ring_group_bytes(dim, rows.min(most)))
            }
            AttentionTile::DecodeRing { blocks, .. } => (blocks, 0),
            AttentionTile::DecodeLatent { .. } | AttentionTile::DecodeLatentWgmma {} => (1, 0),
            _ => (0, 0),
        };
        let Some(limits) = device.limits().filter(|_| most != 0) else {
            return Ok(Loaded { variant, entry: load(smem_bytes)?, places: u32::MAX, joins: false });
        };
        // A multiprocessor has one KiB more than a block can take, and takes one for each.
        let held = |bytes: u32| ((limits.smem_per_block_bytes + (1 << 10)) / (bytes + (1 << 10))).min(most);
        let fits = held(smem_bytes + joined_bytes) == held(smem_bytes);
        let entry = load(if fits { smem_bytes + joined_bytes } else { smem_bytes })?;
        // On Hopper latent attention's have the registers.
        let joins = fits && (joined_bytes != 0 || variant.tile == AttentionTile::DecodeLatentWgmma {});
        Ok(Loaded { variant, entry, places: limits.num_sms.max(1) * held(smem_bytes).max(1), joins })
    }
}

#[derive(Debug)]
pub(super) struct Splits {
    pub(super) merge: Loaded,
    /// From so many pieces of `MERGE_PARTS` times `MERGE_COLUMNS` columns on a warp of the merge does each.
    pub(super) many_pieces: u32,
    /// What the splits leave for the merge, both `[sequence, head, query, result, …]` f32, a result being a split's or
    /// a group's: unfinished results of `head_dim`; maximum and sum of the weights.
    pub(super) workspace: Workspace<2>,
}

/// What the kernels whose blocks share keys need besides.
#[derive(Debug)]
pub(super) struct KeyParts {
    combine: Loaded,
    /// The parts' results `[row, head_dim_v]`, and their largest scores and sums of weights `[row, 2]` f32.
    workspace: Workspace<2>,
}

impl KeyParts {
    /// With room for so many rows of all heads and parts.
    pub(super) fn new(device: &Device, problem: &AttentionProblem, rows: usize) -> Result<Self, Error> {
        let combine = Loaded::new(device, select::combine(problem)?, 0)?;
        let workspace = Workspace::new(device, |stream| {
            let partial = Tensor::empty(stream, &[rows, problem.head_dim_v], problem.dtype)?;
            Ok([partial, Tensor::empty(stream, &[rows, 2], DType::F32)?])
        })?;
        Ok(KeyParts { combine, workspace })
    }

    /// Most parts that there is room for, as a power of two; none if there is no room for one.
    pub(super) fn most_log2(&self, dims: &Checked) -> Option<u32> {
        let rows = u64::from(dims.rows()) * u64::from(dims.heads_q);
        let room = self.workspace.tensors[0].shape()[0] as u64;
        Some((room / rows.max(1)).checked_ilog2()?.min(MAX_KEY_PARTS_LOG2))
    }
}

/// What a run is done with.
pub(super) struct With<'a> {
    pub(super) kernel: &'a Loaded,
    pub(super) splits: Option<&'a Splits>,
    /// With log2 of the parts, for a kernel whose blocks share keys.
    pub(super) key_parts: Option<(&'a KeyParts, u32)>,
    pub(super) counter: Option<&'a Workspace<1>>,
}

/// Where a kernel of many queries leaves its results.
struct Target<'a> {
    out: TensorView<'a>,
    lse: Param<'a>,
    sinks: Param<'a>,
}

impl<'a> Target<'a> {
    /// Those of the run.
    fn of(args: &'a AttentionArgs<'_>) -> Self {
        let AttentionArgs { out, lse, scores, .. } = args;
        Target { out: out.as_view(), lse: lse.as_ref().into(), sinks: scores.sinks.into() }
    }
}

impl AttentionArgs<'_> {
    /// What tells how many keys sequences have, and, if they are packed, where.
    pub(super) fn lens(&self) -> Param<'_> {
        if self.offsets.kv.is_some() { self.offsets.kv } else { self.kv_lens }.into()
    }
}

impl Planned {
    /// Starts the kernels of a run, or of some of its sequences.
    pub(super) fn attend(
        &self,
        stream: &Stream,
        &With { kernel, splits, key_parts, counter }: &With<'_>,
        args: &AttentionArgs<'_>,
        dims: Checked,
    ) -> Result<(), Error> {
        // None where they are gathered.
        let page_size = self.problem.page_size.filter(|_| args.page_table.is_some());
        let tile = kernel.variant.tile;
        if let Some(parts) = key_parts.filter(|_| tile.splits_keys()) {
            return self.in_key_parts(stream, (kernel, counter), parts, args, dims, page_size);
        }
        match (tile, splits, counter) {
            (tile, Some(splits), _) if tile.is_decode() => {
                let launch = dims.for_decode(kernel, page_size, splits.many_pieces)?;
                self.decode(stream, kernel, splits, args, &launch)
            }
            (AttentionTile::Wgmma { keys, .. }, _, Some(counter)) => {
                let dims = dims.for_wgmma(tile, keys, page_size, self.device.profile().num_sms)?;
                self.wgmma(stream, kernel, counter, args, &Target::of(args), &dims)
            }
            _ => prefill(stream, kernel, args, &Target::of(args), &dims.for_prefill(tile)),
        }
    }

    /// Runs a kernel that takes tensor maps.
    fn wgmma(
        &self,
        stream: &Stream,
        kernel: &Loaded,
        counter: &Workspace<1>,
        args: &AttentionArgs<'_>,
        to: &Target<'_>,
        dims: &AttentionDims,
    ) -> Result<(), Error> {
        let AttentionArgs { q, k, v, scores, page_table, .. } = args;
        let [next_tile] = &counter.tensors;
        let tile = kernel.variant.tile;
        let map = |view, box_rows| self.tensor_map(view, box_rows);
        let (q_map, out_map) = (map(q, tile.rows())?, map(&to.out, 64)?);
        // Without keys nothing is loaded from them.
        let (k_map, v_map) =
            if dims.seq_kv == 0 { (q_map, q_map) } else { (map(k, dims.box_keys)?, map(v, dims.box_keys)?) };
        let params = [
            (&q_map).into(),
            (&k_map).into(),
            (&v_map).into(),
            (&out_map).into(),
            (*v).into(),
            to.out.into(),
            args.lens(),
            args.offsets.q.into(),
            (*page_table).into(),
            to.lse,
            to.sinks,
            scores.bias.into(),
            scores.blocks.into(),
            next_tile.view().into(),
            dims.into(),
        ];
        let _alone = counter.enter(stream)?;
        // SAFETY: `check` found every row of every tensor inside its view, and the maps have its sizes and strides; the
        // blocks draw all tiles of all heads and sequences, by a number that no other stream's run uses until this one
        // is done; threads and shared memory are the tile's.
        unsafe { kernel.entry.launch(stream, [dims.grid, 1, 1], [tile.threads(), 1, 1], &params) }
    }

    /// Runs a kernel whose blocks share keys, in so many parts (log2) of which there is room for the results, then the
    /// one that combines these.
    fn in_key_parts(
        &self,
        stream: &Stream,
        (kernel, counter): (&Loaded, Option<&Workspace<1>>),
        (parts, parts_log2): (&KeyParts, u32),
        args: &AttentionArgs<'_>,
        dims: Checked,
        page_size: Option<usize>,
    ) -> Result<(), Error> {
        let [partial, numbers] = &parts.workspace.tensors;
        let heads = dims.heads_q as usize;
        let (batch, tokens) = match dims.tokens_q {
            0 => (dims.batch << parts_log2, dims.seq_q),
            tokens => (1, tokens << parts_log2),
        };
        let shape = [batch as usize, tokens as usize, heads, self.problem.head_dim_v];
        let rows = shape[..3].iter().product();
        let out = partial.view().slice(0, 0..rows)?.reshape(&shape)?;
        let to = Target { out, lse: numbers.view().into(), sinks: Param::Address(0) };
        let _alone = parts.workspace.enter(stream)?;
        let split = dims.in_parts(parts_log2);
        match (kernel.variant.tile, counter) {
            (tile @ AttentionTile::Wgmma { keys, .. }, Some(counter)) => {
                let split = split.for_wgmma(tile, keys, page_size, self.device.profile().num_sms)?;
                self.wgmma(stream, kernel, counter, args, &to, &split)?;
            }
            (tile, _) => prefill(stream, kernel, args, &to, &split.for_prefill(tile))?,
        }
        let pieces = u64::from(dims.rows()) * u64::from(dims.heads_q) * u64::from(dims.head_dim_v / 8);
        let (tile, combined) = (parts.combine.variant.tile, dims.for_combine(parts_log2));
        let grid =
            check_size(OP, "problem", "number of blocks", pieces.div_ceil(tile.threads().into()) as usize)?;
        let params = [
            partial.view().into(),
            numbers.view().into(),
            args.offsets.q.into(),
            (&args.out).into(),
            args.lse.as_ref().into(),
            args.scores.sinks.into(),
            (&combined).into(),
        ];
        // SAFETY: as for prefill; the kernel before has left results of all parts and rows, of which `most_log2` found
        // that there is room, and no run of another stream uses them until this one is done; the grid covers all
        // pieces.
        unsafe { parts.combine.entry.launch(stream, [grid, 1, 1], [tile.threads(), 1, 1], &params) }
    }

    /// The map of `[sequence, token, head, column]` in boxes of 64 columns of a head.
    fn tensor_map(&self, view: &TensorView<'_>, box_rows: u32) -> Result<TensorMap, Error> {
        let bytes = view.dtype().bytes();
        // The stride of a single one is not used; it must be one all the same.
        let axis = |axis: usize| {
            let (size, stride) = (view.shape()[axis], view.strides()[axis] * bytes);
            Axis { size: size as u64, stride_bytes: if size <= 1 { 16 } else { stride as u64 } }
        };
        let tokens = axis(1);
        let tiled = Tiled {
            dtype: view.dtype(),
            address: view.address(),
            rows: tokens.size,
            cols: view.shape()[3] as u64,
            stride_bytes: tokens.stride_bytes,
            outer: Some([axis(2), axis(0)]),
            box_rows,
            box_cols: 64,
            box_matrices: 1,
            swizzle: Swizzle::Bytes128,
        };
        self.device.tensor_map(OP, &tiled)
    }

    /// Runs a kernel for few queries, then the merge.
    fn decode(
        &self,
        stream: &Stream,
        kernel: &Loaded,
        splits: &Splits,
        args: &AttentionArgs<'_>,
        launch: &Decode,
    ) -> Result<(), Error> {
        let AttentionArgs { q, k, v, kv_scales, out, lse, scores, page_table, .. } = args;
        let Splits { merge, workspace, .. } = splits;
        let Decode { dims, grid, merge_grid } = launch;
        let [partial, stats] = &workspace.tensors;
        let (partial, stats) = (partial.view(), stats.view());
        // Without keys there are no splits, and nothing is launched.
        let k_map = match kernel.variant.tile {
            AttentionTile::DecodeLatentWgmma {} if dims.seq_kv != 0 => {
                Some(self.tensor_map(k, dims.box_keys)?)
            }
            _ => None,
        };
        let latent_params = k_map.as_ref().map(|k_map| {
            [
                k_map.into(),
                (*q).into(),
                args.lens(),
                args.offsets.q.into(),
                (*page_table).into(),
                partial.into(),
                stats.into(),
                dims.into(),
            ]
        });
        let params = [
            kv_scales.k.into(),
            kv_scales.v.into(),
            (*q).into(),
            (*k).into(),
            (*v).into(),
            args.lens(),
            args.offsets.q.into(),
            (*page_table).into(),
            scores.bias.into(),
            scores.blocks.into(),
            partial.into(),
            stats.into(),
            dims.into(),
        ];
        // Only the kernels for fp8 know scales.
        let params = match &latent_params {
            Some(latent_params) => &latent_params[..],
            None if kernel.variant.dtype_kv == DType::F8E4M3 => &params[..],
            None => &params[2..],
        };
        let merge_params = [
            partial.into(),
            stats.into(),
            args.lens(),
            args.offsets.q.into(),
            out.into(),
            lse.as_ref().into(),
            scores.sinks.into(),
            dims.into(),
        ];
        let _alone = workspace.enter(stream)?;
        // SAFETY: as for prefill; the workspace has room for the rows and splits of the planned sizes, which `check`
        // found the run's not to exceed, and no run of another stream uses it until this one is done. The merge has the
        // same dims.
        unsafe {
            kernel.entry.launch(stream, [*grid, 1, 1], [kernel.variant.tile.threads(), 1, 1], params)?;
            merge.entry.launch(stream, *merge_grid, [merge.variant.tile.threads(), 1, 1], &merge_params)
        }
    }
}

fn prefill(
    stream: &Stream,
    kernel: &Loaded,
    args: &AttentionArgs<'_>,
    to: &Target<'_>,
    dims: &AttentionDims,
) -> Result<(), Error> {
    let AttentionArgs { q, k, v, scores, page_table, .. } = args;
    let grid = blocks(&[dims.tiles, dims.batch, dims.heads_q, 1 << dims.key_parts_log2])?;
    let params = [
        (*q).into(),
        (*k).into(),
        (*v).into(),
        args.lens(),
        args.offsets.q.into(),
        (*page_table).into(),
        to.out.into(),
        to.lse,
        to.sinks,
        scores.bias.into(),
        scores.blocks.into(),
        dims.into(),
    ];
    // SAFETY: `check` found every row of every tensor inside its view, and `vector` what is read in pieces of 16 bytes;
    // the grid covers exactly the tiles of all heads and sequences.
    unsafe { kernel.entry.launch(stream, [grid, 1, 1], [kernel.variant.tile.threads(), 1, 1], &params) }
}

/// Blocks altogether.
pub(super) fn blocks(factors: &[u32]) -> Result<u32, Error> {
    let blocks = factors.iter().try_fold(1usize, |blocks, &factor| blocks.checked_mul(factor as usize));
    check_size(OP, "problem", "number of blocks", blocks.unwrap_or(usize::MAX))
}
