//! `Invariance::Batch`: rows have the bits that they have alone, on every device, whatever is planned and run beside
//! them. Whole models: `tests/models/batch.rs`.

use half::{bf16, f16};
use proptest::test_runner::TestCaseError;
use testkit::strategies::Values;
use warpforge::ops::attention::{Attention, AttentionArgs, AttentionProblem, Mask};
use warpforge::ops::glu::Activation;
use warpforge::ops::grouped_matmul::{GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem, GroupedRows};
use warpforge::ops::matmul::{Act, Epilogue, Matmul, MatmulArgs, MatmulB, MatmulProblem, RowNorm};
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::weight::{Quantised, Scheme, Weight};
use warpforge::{DType, Device, Error, Invariance, Stream, Tensor};

use crate::harness::{devices, fail, values, with_type};

/// All devices, under the switch.
fn invariant() -> impl Iterator<Item = Device> {
    devices().into_iter().map(|device| device.with_invariance(Invariance::Batch))
}

/// Rows that are run at a time, by turns, until there are none left.
const PIECES: [usize; 6] = [1, 17, 1, 2, 9, 40];

fn pieces(rows: usize) -> Vec<std::ops::Range<usize>> {
    let mut start = 0;
    let mut cut = Vec::new();
    for piece in PIECES.into_iter().cycle() {
        let end = rows.min(start + piece);
        cut.push(start..end);
        start = end;
        if start == rows {
            break;
        }
    }
    cut
}

fn normal(stream: &Stream, shape: &[usize], dtype: DType, seed: u64) -> Result<Tensor, Error> {
    let drawn = values(Values::Normal, dtype, shape.iter().product(), seed);
    Tensor::from_bytes(stream, shape, dtype, &testkit::round::encode(dtype, &drawn))
}

/// Rows whose second half is the first from its end on, times a sign: products of such of either sign are 0, but for
/// what is rounded on the way. So any other order of a sum shows, also in 16 bits.
fn mirrored(
    stream: &Stream,
    shape: &[usize],
    dtype: DType,
    (sign, seed): (f64, u64),
) -> Result<Tensor, Error> {
    let mut drawn = values(Values::Normal, dtype, shape.iter().product(), seed);
    let k = shape[shape.len() - 1];
    for row in drawn.chunks_exact_mut(k) {
        let (first, second) = row.split_at_mut(k / 2);
        std::iter::zip(first.iter().rev(), second).for_each(|(first, second)| *second = sign * first);
    }
    Tensor::from_bytes(stream, shape, dtype, &testkit::round::encode(dtype, &drawn))
}

/// The same of weights that are to be packed, in groups of at most half a row.
fn mirrored_row(row: usize, out: &mut [f32]) {
    let k = out.len();
    let value = |i: usize| ((row * 31 + i * i * 7) % 97) as f32 - 48.0;
    out.iter_mut().enumerate().for_each(|(i, out)| *out = value(i.min(k - 1 - i)));
}

fn bits(stream: &Stream, tensor: &Tensor) -> Result<Vec<u8>, Error> {
    with_type!(tensor.dtype(), T => Ok(bytemuck::cast_slice(&tensor.to_vec::<T>(stream)?).to_vec()))
}

fn expect_same(what: String, got: &[u8], want: &[u8]) -> Result<(), TestCaseError> {
    match std::iter::zip(got, want).position(|(got, want)| got != want) {
        None => Ok(()),
        Some(byte) => Err(TestCaseError::fail(format!("{what}: byte {byte} of {} differs", got.len()))),
    }
}

/// A product, of plain and of packed weights, with a gate or without: all rows at once, and some at a time by plans for
/// as many.
#[test]
fn products() -> Result<(), TestCaseError> {
    let (m, n, k) = (43, 80, 512);
    let gated = Epilogue::of(Act::Gated(Activation::Silu));
    for device in invariant() {
        let stream = device.stream().map_err(fail)?;
        for (dtype, out_dtype, epilogue, scheme) in [
            (DType::F32, DType::F32, Epilogue::NONE, None),
            (DType::BF16, DType::BF16, Epilogue::NONE, None),
            (DType::F16, DType::F32, Epilogue::NONE, None),
            (DType::BF16, DType::BF16, gated, None),
            (DType::BF16, DType::BF16, Epilogue::NONE, Some(Scheme::INT4)),
            (DType::BF16, DType::F32, Epilogue::NONE, Some(Scheme::INT8)),
        ] {
            let weight = scheme.map(|scheme| scheme.layout());
            let problem =
                |m| MatmulProblem { out_dtype, epilogue, weight, ..MatmulProblem::new(m, n, k, dtype) };
            let b_rows = if epilogue == gated { 2 * n } else { n };
            let a = mirrored(&stream, &[m, k], dtype, (-1.0, 1)).map_err(fail)?;
            let b = mirrored(&stream, &[b_rows, k], dtype, (1.0, 2)).map_err(fail)?;
            let packed =
                scheme.map(|scheme| Weight::pack(&stream, &Quantised::new([n, k], scheme, mirrored_row)?));
            let packed = packed.transpose().map_err(fail)?;
            let b = packed.as_ref().map_or(MatmulB::Matrix(b.view()), MatmulB::Packed);
            let mut all = Tensor::empty(&stream, &[m, n], out_dtype).map_err(fail)?;
            let mut parts = Tensor::empty(&stream, &[m, n], out_dtype).map_err(fail)?;
            let whole = Matmul::plan(&device, problem(m)).map_err(fail)?;
            whole.run(&stream, MatmulArgs::new(a.view(), b, all.view_mut())).map_err(fail)?;
            for rows in pieces(m) {
                let plan = Matmul::plan(&device, problem(rows.len())).map_err(fail)?;
                assert_eq!(plan.report().variant, whole.report().variant, "{device:?}");
                let out = parts.view_mut().slice(0, rows.clone()).map_err(fail)?;
                let args = MatmulArgs::new(a.view().slice(0, rows).map_err(fail)?, b, out);
                plan.run(&stream, args).map_err(fail)?;
            }
            let [all, parts] = [all, parts].map(|out| bits(&stream, &out));
            let what = format!("{dtype} to {out_dtype}, {epilogue:?}, {weight:?}, {device:?}");
            expect_same(what, &parts.map_err(fail)?, &all.map_err(fail)?)?;
        }
    }
    Ok(())
}

/// Several products of a step: a head's of some tokens, whose rows lie apart.
#[test]
fn products_of_heads() -> Result<(), TestCaseError> {
    let (heads, m, n, k) = (3, 43, 48, 208);
    for device in invariant() {
        let stream = device.stream().map_err(fail)?;
        for dtype in [DType::F32, DType::BF16] {
            let problem = |m| MatmulProblem { batch: heads, ..MatmulProblem::new(m, n, k, dtype) };
            let a = mirrored(&stream, &[m, heads, k], dtype, (-1.0, 1)).map_err(fail)?;
            let b = mirrored(&stream, &[heads, n, k], dtype, (1.0, 2)).map_err(fail)?;
            let [mut all, mut parts] =
                [(); 2].map(|()| Tensor::empty(&stream, &[m, heads, n], dtype).expect("memory"));
            let run = |rows: std::ops::Range<usize>, out: &mut Tensor| -> Result<(), Error> {
                let a = a.view().slice(0, rows.clone())?.swap_axes(0, 1)?;
                let out = out.view_mut().slice(0, rows.clone())?.swap_axes(0, 1)?;
                Matmul::plan(&device, problem(rows.len()))?.run(&stream, MatmulArgs::new(a, b.view(), out))
            };
            run(0..m, &mut all).map_err(fail)?;
            pieces(m).into_iter().try_for_each(|rows| run(rows, &mut parts)).map_err(fail)?;
            let [all, parts] = [all, parts].map(|out| bits(&stream, &out));
            expect_same(format!("{dtype}, {device:?}"), &parts.map_err(fail)?, &all.map_err(fail)?)?;
        }
    }
    Ok(())
}

/// A token's products with its experts', of plain and of packed weights, whoever else goes to them.
#[test]
fn products_of_experts() -> Result<(), TestCaseError> {
    let (tokens, experts, n, k) = (43usize, 3usize, 48, 256);
    for device in invariant() {
        let stream = device.stream().map_err(fail)?;
        for (dtype, scheme) in [(DType::F32, None), (DType::BF16, None), (DType::BF16, Some(Scheme::MXFP4))] {
            let weight = scheme.map(|scheme| scheme.layout());
            let x = mirrored(&stream, &[tokens, k], dtype, (-1.0, 1)).map_err(fail)?;
            let w = mirrored(&stream, &[experts, n, k], dtype, (1.0, 2)).map_err(fail)?;
            let packed = scheme.map(|scheme| {
                Weight::pack_experts(&stream, experts, |expert| {
                    Quantised::new([n, k], scheme, move |row: usize, out: &mut [f32]| {
                        mirrored_row(expert * 13 + row, out);
                    })
                })
            });
            let packed = packed.transpose().map_err(fail)?;
            let w = packed.as_ref().map_or(MatmulB::Matrix(w.view()), MatmulB::Packed);
            // Most go to the first.
            let expert_of = |token: usize| if token % 5 < 3 { 0 } else { token % experts };
            let run = |of: std::ops::Range<usize>, out: &mut Vec<Vec<u8>>| -> Result<(), Error> {
                let (start, count) = (of.start, of.len());
                let expert_of = |row: &u32| expert_of(start + *row as usize);
                let mut order: Vec<u32> = (0..count as u32).collect();
                order.sort_by_key(expert_of);
                let before = |expert| order.iter().filter(|row| expert_of(row) < expert).count();
                let offsets: Vec<u32> = (0..=experts).map(|expert| before(expert) as u32).collect();
                let from = GroupedRows::Gathered { fan_out: 1 };
                let problem = GroupedMatmulProblem {
                    from,
                    weight,
                    ..GroupedMatmulProblem::new(count, experts, n, k, dtype)
                };
                let offsets = Tensor::from_slice(&stream, &[experts + 1], &offsets)?;
                let sorted = Tensor::from_slice(&stream, &[count], &order)?;
                let mut rows = Tensor::empty(&stream, &[count, n], dtype)?;
                let x = x.view().slice(0, of)?;
                let args = GroupedMatmulArgs::new(x, w, offsets.view(), rows.view_mut());
                let args = GroupedMatmulArgs { order: Some(sorted.view()), ..args };
                GroupedMatmul::plan(&device, problem)?.run(&stream, args)?;
                let rows = bits(&stream, &rows)?;
                let row = |token: u32| {
                    let place = order.iter().position(|&other| other == token).unwrap_or_default();
                    let bytes = n * dtype.bytes();
                    rows[place * bytes..(place + 1) * bytes].to_vec()
                };
                out.extend((0..count as u32).map(row));
                Ok(())
            };
            let (mut all, mut parts) = (Vec::new(), Vec::new());
            run(0..tokens, &mut all).map_err(fail)?;
            pieces(tokens).into_iter().try_for_each(|of| run(of, &mut parts)).map_err(fail)?;
            expect_same(format!("{dtype}, {weight:?}, {device:?}"), &parts.concat(), &all.concat())?;
        }
    }
    Ok(())
}

/// The queries at the end of a sequence, all at once, and some at a time as its tokens come, in pages and in rows, in
/// caches of other sizes.
#[test]
fn queries_of_a_sequence() -> Result<(), TestCaseError> {
    const PAGE: usize = 16;
    for device in invariant() {
        let stream = device.stream().map_err(fail)?;
        for (dtype, (heads_q, heads_kv), (head_dim, head_dim_v), window, before) in [
            (DType::F32, (2, 1), (64, 64), None, 101),
            (DType::BF16, (4, 2), (64, 64), Some(37), 101),
            // So many that blocks would share them.
            (DType::BF16, (1, 1), (64, 64), None, 1100),
            (DType::BF16, (2, 1), (128, 128), None, 50),
            (DType::BF16, (1, 1), (576, 512), None, 50),
        ] {
            let (before, queries): (usize, usize) = (before, 43);
            let pages = (before + queries).div_ceil(PAGE);
            let q = normal(&stream, &[queries, heads_q, head_dim], dtype, 1).map_err(fail)?;
            let k = normal(&stream, &[pages, PAGE, heads_kv, head_dim], dtype, 2).map_err(fail)?;
            let v = normal(&stream, &[pages, PAGE, heads_kv, head_dim_v], dtype, 3).map_err(fail)?;
            // As in latent attention, v is the first columns of k.
            let (k, v) =
                (k.view(), if head_dim > 256 { k.view().slice(3, 0..head_dim_v) } else { Ok(v.view()) });
            let v = v.map_err(fail)?;
            let table: Vec<u32> = (0..pages as u32).collect();
            let table = Tensor::from_slice(&stream, &[1, pages], &table).map_err(fail)?;
            let run = |of: std::ops::Range<usize>, paged: bool, more: usize| -> Result<Vec<u8>, Error> {
                let (seq_q, len) = (of.len(), before + of.end);
                let problem = AttentionProblem {
                    head_dim_v,
                    mask: Mask::Causal,
                    window,
                    page_size: paged.then_some(PAGE),
                    ..AttentionProblem::new(1, [seq_q, len + more], [heads_q, heads_kv], head_dim, dtype)
                };
                let plan = Attention::plan(&device, problem)?;
                let shape = [1, seq_q, heads_q, head_dim];
                let q = q.view().slice(0, of)?.reshape(&shape)?;
                let mut out = Tensor::empty(&stream, &[1, seq_q, heads_q, head_dim_v], dtype)?;
                let mut lse = Tensor::empty(&stream, &[1, heads_q, seq_q], DType::F32)?;
                let lens = Tensor::from_slice(&stream, &[1], &[len as u32])?;
                if paged {
                    let table = table.view().slice(1, 0..len.div_ceil(PAGE))?;
                    let args = AttentionArgs {
                        lse: Some(lse.view_mut()),
                        ..AttentionArgs::new(q, k, v, out.view_mut())
                    };
                    let args = AttentionArgs { kv_lens: Some(lens.view()), page_table: Some(table), ..args };
                    plan.run(&stream, args)?;
                } else {
                    let [k, v] = [k, v].map(|x| {
                        let [heads, dim] = [2, 3].map(|axis| x.shape()[axis]);
                        x.reshape(&[pages * PAGE, heads, dim])?
                            .slice(0, 0..len)?
                            .reshape(&[1, len, heads, dim])
                    });
                    let args = AttentionArgs::new(q, k?, v?, out.view_mut());
                    plan.run(&stream, AttentionArgs { lse: Some(lse.view_mut()), ..args })?;
                }
                // By queries, with the sums of the weights, which are not rounded to 16 bits.
                let (out, lse) = (bits(&stream, &out)?, lse.to_vec::<f32>(&stream)?);
                let rows = out.chunks_exact(out.len() / seq_q).enumerate().flat_map(|(query, row)| {
                    let sums = (0..heads_q).flat_map(|head| lse[head * seq_q + query].to_ne_bytes());
                    row.iter().copied().chain(sums.collect::<Vec<_>>())
                });
                Ok(rows.collect())
            };
            let all = run(0..queries, true, 0).map_err(fail)?;
            for (paged, more) in [(true, 1000), (false, 0)] {
                let parts = pieces(queries).into_iter().map(|of| run(of, paged, more));
                let parts = parts.collect::<Result<Vec<_>, _>>().map_err(fail)?.concat();
                let what =
                    format!("{dtype} {head_dim}, {before}, window {window:?}, pages {paged}, {device:?}");
                expect_same(what, &parts, &all)?;
            }
        }
    }
    Ok(())
}

/// What cannot be held is refused, on every device.
#[test]
fn norms_before_products_are_refused() {
    for device in invariant() {
        let norm = Some(RowNorm { eps: 1e-6, weight: NormWeight::Plain });
        let problem = MatmulProblem { norm, ..MatmulProblem::new(1, 64, 256, DType::BF16) };
        for error in [Matmul::supports(&device, &problem).err(), Matmul::plan(&device, problem).err()] {
            let message = error.map(|error| error.to_string()).unwrap_or_default();
            let want = "matmul: problem: expected without a norm, under Invariance::Batch, got one";
            assert_eq!(message, want, "{device:?}");
        }
    }
}
