//! Products of fp8 by fp8: rows become fp8, and are multiplied with a packed weight that is.

use abi::DType;
use abi::matmul_fp8::{self, BLOCK_K, QuantiseDims};
use abi::ops::matmul::{
    FP8_VARIANTS, MatmulDims, MatmulEpilogue, MatmulTile, MatmulVariant, OUT_BY_TMA, OUT_IN_PIECES,
    WGMMA_OUT_ROWS,
};
use abi::weight::{Layout, TILE_K};

use super::{Activations, MatmulArgs, MatmulProblem, OP, matrix_map, residual};
use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::launch::Entry;
use crate::ops::fp8_rows::Fp8Rows;
use crate::param::Param;
use crate::stream::Stream;
use crate::weight::Weight;

/// The kernels for a problem with a weight of this layout; none where rows may not become fp8, or it is for others.
pub(super) fn variants(
    limits: &DeviceLimits,
    problem: &MatmulProblem,
    layout: &Layout,
) -> Vec<&'static MatmulVariant> {
    let MatmulProblem { batch, k, dtype, out_dtype, activations, .. } = *problem;
    let fits = activations == Activations::Fp8
        && matmul_fp8::dense_takes(layout)
        && batch == 1
        && k > 0
        && k.is_multiple_of(16 / dtype.bytes());
    let can = |variant: &&MatmulVariant| {
        (variant.dtype, variant.out_dtype) == (dtype, out_dtype)
            && limits.floor.runs(variant.floor)
            && variant.tile.smem_bytes(dtype) <= limits.smem_per_block_bytes
    };
    if fits && !limits.is_invariant() { FP8_VARIANTS.iter().filter(can).collect() } else { Vec::new() }
}

/// Cycles that a tile takes on an H200: of a step of 128 of k with all multiprocessors at work, and besides. By rows,
/// columns and blocks of a cluster: `benches/record/h200/2026-11-27-fp8.md`.
const CYCLES: [([u32; 3], [u64; 2]); 4] = [
    ([128, 128, 1], [891, 2500]),
    ([128, 128, 2], [834, 2500]),
    ([192, 128, 2], [986, 5000]),
    ([128, 192, 2], [1200, 3000]),
];

/// Cycles of so many rounds of a tile.
fn cycles(tile: MatmulTile, rounds: u64, k: u32) -> u64 {
    let MatmulTile::Wgmma { bm, bn, cluster, .. } = tile else { return u64::MAX };
    let found = CYCLES.iter().find(|(of, _)| *of == [bm, bn, cluster]);
    let [step, besides] = found.map_or([u64::from(bm * bn / 16), 0], |(_, cycles)| *cycles);
    rounds * (u64::from(k.div_ceil(BLOCK_K)) * step + besides)
}

/// The product, planned.
#[derive(Debug)]
pub(super) struct Fp8 {
    from: usize,
    rows: Fp8Rows,
    kernels: Vec<(&'static MatmulVariant, Entry)>,
}

impl Fp8 {
    pub(super) fn new(
        device: &Device,
        problem: &MatmulProblem,
        (variants, from): (Vec<&'static MatmulVariant>, usize),
    ) -> Result<Self, Error> {
        let MatmulProblem { m, k, dtype, .. } = *problem;
        let load = |variant: &'static MatmulVariant| {
            let MatmulTile::Wgmma { threads, cluster, .. } = variant.tile else {
                return Err(Error::invalid(
                    OP,
                    "variant",
                    "a tile of `wgmma`",
                    format!("{:?}", variant.tile),
                ));
            };
            let entry = device.entry(OP, variant.entry, variant.tile.smem_bytes(dtype))?;
            Ok((variant, entry.in_clusters(cluster, threads, device.profile().num_sms)?))
        };
        let kernels = variants.into_iter().map(load).collect::<Result<_, Error>>()?;
        Ok(Fp8 { from, rows: Fp8Rows::new(OP, device, [m, k], dtype)?, kernels })
    }

    /// Rows from which on it is taken.
    pub(super) fn from(&self) -> usize {
        self.from
    }

    /// The kernel of the least time for a launch, by its rounds.
    pub(super) fn kernel(&self, [m, b_rows, k]: [u32; 3]) -> Option<&(&'static MatmulVariant, Entry)> {
        let rounds = |(variant, entry): &(&'static MatmulVariant, Entry)| {
            entry.rounds_of(variant.tile.blocks(m, b_rows, 0))
        };
        self.kernels.iter().min_by_key(|kernel| cycles(kernel.0.tile, rounds(kernel), k))
    }

    /// Runs the product of checked tensors, of rows of a in pieces.
    pub(super) fn run(
        &self,
        stream: &Stream,
        (args, weight): (MatmulArgs<'_>, &Weight),
        mut dims: MatmulDims,
        how: &MatmulEpilogue,
    ) -> Result<(), Error> {
        let MatmulArgs { a, bias, ref out, .. } = args;
        let (device, out_dtype) = (stream.device(), out.dtype());
        let Some((variant, entry)) = self.kernel([dims.m, dims.n, dims.k]) else {
            return Err(Error::invalid(OP, "choices", "a kernel of fp8 by fp8", "none"));
        };
        let MatmulTile::Wgmma { bm, bn, cluster, .. } = variant.tile else {
            return Err(Error::invalid(OP, "variant", "a tile of `wgmma`", format!("{:?}", variant.tile)));
        };
        let of_rows = QuantiseDims {
            rows: dims.m,
            x_rows: dims.m,
            fan_out: 0,
            k: dims.k,
            x_stride: dims.a_stride,
            q_stride: 0,
        };
        // SAFETY: `check` found every row of a inside its view, here in pieces of 16 bytes with k in such.
        let rows = unsafe { self.rows.make(stream, (a, Param::Address(0)), of_rows)? };
        (dims.k, dims.a_stride) = (rows.stride, rows.stride);
        let own_rows = dims.m.next_multiple_of(8).min(bm);
        let sizes = [dims.m, dims.k, dims.a_stride];
        let a_map = matrix_map(OP, device, DType::F8E4M3, rows.q.address(), sizes, own_rows)?;
        let b_map = weight.tiles_map(OP, device, bn / cluster)?;
        // Of a gated product the weight has two rows for each column.
        let n = out.shape().last().map_or(0, |&n| n as u32);
        let is_gated = n != dims.n;
        let in_boxes =
            (!is_gated || bn.is_multiple_of(128)) && n.is_multiple_of(8) && dims.access & OUT_IN_PIECES != 0;
        let out_map = if in_boxes {
            dims.access |= OUT_BY_TMA;
            let sizes = [dims.m, n, dims.out_stride];
            matrix_map(OP, device, out_dtype, out.address(), sizes, WGMMA_OUT_ROWS)?
        } else {
            a_map
        };
        let clusters = entry.clusters_for(variant.tile.blocks(dims.m, dims.n, 0));
        let of_weight = weight.dims();
        let [_, scales, ..] = weight.params();
        let params = [
            (&dims).into(),
            how.into(),
            (&a_map).into(),
            (&b_map).into(),
            (&out_map).into(),
            rows.scales.into(),
            scales,
            bias.into(),
            residual(&args),
            out.into(),
            (&of_weight).into(),
        ];
        // SAFETY: `check` found every row of every tensor inside its view, and the weight's layout, which `variants`
        // has looked at, and size as planned; rows of a are as the launch before has made them; the maps have the sizes
        // of all; the blocks walk over all tiles; shared memory and clusters are the tile's.
        unsafe { entry.launch(stream, [clusters * cluster, 1, 1], [variant.tile.threads(), 1, 1], &params) }
    }
}

const _: () = assert!(BLOCK_K == 2 * TILE_K);

#[cfg(test)]
mod tests {
    use super::*;

    /// On a card of 132 multiprocessors, of which a cluster takes two: what was the fastest there.
    #[test]
    fn choice_by_rounds() {
        for (m, n, k, fastest) in [
            (8192, 8192, 8192, "matmul_bf16_fp8__m192n128c2__sm90a"),
            (4096, 2560, 9728, "matmul_bf16_fp8__m192n128c2__sm90a"),
            (1024, 2560, 9728, "matmul_bf16_fp8__m192n128c2__sm90a"),
            (256, 19456, 2560, "matmul_bf16_fp8__n192c2__sm90a"),
            (128, 19456, 2560, "matmul_bf16_fp8__n128__sm90a"),
        ] {
            let time = |variant: &&MatmulVariant| match variant.tile {
                MatmulTile::Wgmma { cluster, .. } => {
                    let tiles = variant.tile.blocks(m, n, 0);
                    cycles(variant.tile, tiles.div_ceil(u64::from(132 / cluster)), k)
                }
                _ => u64::MAX,
            };
            let of_type = FP8_VARIANTS.iter().filter(|variant| variant.dtype == DType::BF16);
            let found = of_type.min_by_key(time).map(|variant| variant.entry);
            assert_eq!(found, Some(fastest), "{m} × {n} × {k}");
        }
    }

    /// Every tile's cycles are known.
    #[test]
    fn tiles_are_timed() {
        for variant in FP8_VARIANTS {
            let MatmulTile::Wgmma { bm, bn, cluster, .. } = variant.tile else { panic!("{}", variant.entry) };
            assert!(CYCLES.iter().any(|(tile, _)| *tile == [bm, bn, cluster]), "{}", variant.entry);
        }
    }
}
