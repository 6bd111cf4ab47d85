//! All layers of a dense decoder for one token against their reference: run after run of one plan, as a sequence grows.

use abi::ops::decoder_layers::{DecoderLayersVariant, MAX_ROWS, TILE_ROWS, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance, check_bits_eq};
use testkit::strategies::{Rng, Values};
use warpforge::ops::decoder_layers::reference::{HEAD_DIM, Layer, Outcome, decoder_layers};
use warpforge::ops::decoder_layers::{
    DecoderLayers, DecoderLayersArgs, DecoderLayersKernel, DecoderLayersProblem, LayerTensors, select,
};
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::ops::rope::RopeTables;
use warpforge::{Arch, DType, Device, Error, Stream, Tensor, TensorView};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, every_kernel, fail, is_simulated, on_executors, runs, store,
    through_every_kernel, values,
};
use crate::places::{MAX_POSITION, angles, inv_freq};

const DTYPE: DType = DType::BF16;

#[derive(Clone, Debug)]
struct Case {
    problem: DecoderLayersProblem,
    /// Keys before the first run's token.
    keys: usize,
    /// Runs, each of the next token.
    runs: usize,
    /// Blocks beyond the fewest.
    more_blocks: u32,
    /// Slots beyond those that are needed.
    more_slots: usize,
    seed: u64,
}

impl Case {
    /// The fewest blocks, and some more.
    fn blocks(&self) -> u32 {
        let DecoderLayersProblem { hidden, intermediate, heads_q, heads_kv, .. } = self.problem;
        let rows = [(heads_q + 2 * heads_kv) * HEAD_DIM, hidden];
        let fewest = rows.map(|rows| rows.div_ceil(MAX_ROWS as usize));
        let pairs = intermediate.div_ceil((MAX_ROWS / 2) as usize);
        [fewest[0], fewest[1], pairs, heads_kv].into_iter().max().unwrap_or(1) as u32 + self.more_blocks
    }

    fn work(&self) -> usize {
        let DecoderLayersProblem { layers, hidden, intermediate, heads_q, heads_kv, .. } = self.problem;
        let weights = hidden * ((2 * heads_q + 2 * heads_kv) * HEAD_DIM + 3 * intermediate);
        let waits = self.blocks() as usize * 384 * 60;
        self.runs * layers * (weights / 4 + waits + heads_q * HEAD_DIM * (self.keys + self.runs) * 4)
    }

    fn num_slots(&self) -> usize {
        let needed = match self.problem.page_size {
            Some(size) => self.problem.max_keys.next_multiple_of(size),
            None => self.problem.max_keys,
        };
        needed + self.problem.page_size.unwrap_or(1) * self.more_slots
    }
}

fn case() -> impl Strategy<Value = Case> {
    let hidden = proptest::sample::select(vec![32usize, 64, 96, 544]);
    let intermediate = proptest::sample::select(vec![32usize, 96, 608]);
    let heads =
        proptest::sample::select(vec![[1usize, 1], [2, 1], [2, 2], [3, 1], [4, 1], [4, 2], [8, 1], [7, 1]]);
    let keys = prop_oneof![3 => 0usize..20, 1 => 100usize..300];
    let page_size = proptest::sample::select(vec![None, Some(16), Some(32)]);
    let weight = prop_oneof![Just(NormWeight::Plain), Just(NormWeight::ZeroCentred)];
    let sizes = (1usize..4, hidden, intermediate, heads, keys, 1usize..4);
    let kinds = (page_size, weight, any::<bool>(), 0usize..20, 0u32..5, 0usize..3);
    (sizes, kinds, any::<u64>()).prop_map(
        |((layers, hidden, intermediate, heads, keys, runs), kinds, seed)| {
            let (page_size, weight, qk_norm, room, more_blocks, more_slots) = kinds;
            let max_keys = keys + runs + room;
            let problem = DecoderLayersProblem {
                page_size,
                weight,
                qk_norm,
                ..DecoderLayersProblem::new(layers, [hidden, intermediate], heads, max_keys, DTYPE, 1e-6)
            };
            Case { problem, keys, runs, more_blocks, more_slots, seed }
        },
    )
}

/// A layer's numbers.
struct Numbers {
    qkv: Vec<f64>,
    o: Vec<f64>,
    gate_up: Vec<f64>,
    down: Vec<f64>,
    norms: [Vec<f64>; 2],
    qk_norms: [Vec<f64>; 2],
    caches: [Vec<f64>; 2],
}

impl Numbers {
    fn new(case: &Case, seed: u64) -> Self {
        let DecoderLayersProblem { hidden, intermediate, heads_q, heads_kv, .. } = case.problem;
        let (q_cols, kv_cols) = (heads_q * HEAD_DIM, heads_kv * HEAD_DIM);
        // Products of about the size of their right side.
        let matrix = |rows: usize, cols: usize, salt: u64| {
            let all = values(Values::Normal, DTYPE, rows * cols, seed ^ salt);
            let scale = 2f64.powi(-((cols as f64).log2() / 2.0).round() as i32);
            all.iter().map(|value| value * scale).collect::<Vec<f64>>()
        };
        let normal = |len: usize, salt: u64| values(Values::Normal, DTYPE, len, seed ^ salt);
        let slots = case.num_slots();
        Numbers {
            qkv: matrix(q_cols + 2 * kv_cols, hidden, 1),
            o: matrix(hidden, q_cols, 2),
            gate_up: matrix(2 * intermediate, hidden, 3),
            down: matrix(hidden, intermediate, 4),
            norms: [normal(hidden, 5), normal(hidden, 6)],
            qk_norms: [normal(HEAD_DIM, 7), normal(HEAD_DIM, 8)],
            caches: [normal(slots * kv_cols, 9), normal(slots * kv_cols, 10)],
        }
    }
}

/// A layer's tensors.
struct Tensors {
    qkv: Rows,
    o: Rows,
    gate_up: Rows,
    down: Rows,
    norms: [Rows; 2],
    qk_norms: [Rows; 2],
    caches: [Rows; 2],
}

impl Tensors {
    fn new(stream: &Stream, case: &Case, numbers: &Numbers) -> Result<Self, Error> {
        let DecoderLayersProblem { hidden, intermediate, heads_q, heads_kv, .. } = case.problem;
        let rows = |data: &[f64], cols| Rows::input(stream, DTYPE, data, cols, Layout::default());
        let pair = |[a, b]: &[Vec<f64>; 2], cols| Ok::<_, Error>([rows(a, cols)?, rows(b, cols)?]);
        Ok(Tensors {
            qkv: rows(&numbers.qkv, hidden)?,
            o: rows(&numbers.o, heads_q * HEAD_DIM)?,
            gate_up: rows(&numbers.gate_up, hidden)?,
            down: rows(&numbers.down, intermediate)?,
            norms: pair(&numbers.norms, hidden)?,
            qk_norms: pair(&numbers.qk_norms, HEAD_DIM)?,
            caches: pair(&numbers.caches, heads_kv * HEAD_DIM)?,
        })
    }

    fn layer(&mut self, problem: &DecoderLayersProblem) -> Result<LayerTensors<'_>, Error> {
        fn row(rows: &Rows) -> Result<TensorView<'_>, Error> {
            let view = rows.view();
            view.reshape(&[view.shape()[1]])
        }
        let Tensors { qkv, o, gate_up, down, norms, qk_norms, caches: [k, v] } = self;
        let cache = [k.view().shape()[0], problem.heads_kv, HEAD_DIM];
        let is_normed = problem.qk_norm;
        Ok(LayerTensors {
            qkv: qkv.view(),
            o: o.view(),
            gate_up: gate_up.view(),
            down: down.view(),
            input_norm: row(&norms[0])?,
            post_attention_norm: row(&norms[1])?,
            q_norm: is_normed.then(|| row(&qk_norms[0])).transpose()?,
            k_norm: is_normed.then(|| row(&qk_norms[1])).transpose()?,
            k_cache: k.view_mut().reshape(&cache)?,
            v_cache: v.view_mut().reshape(&cache)?,
        })
    }
}

fn plan(
    device: &Device,
    case: &Case,
    variant: Option<&'static DecoderLayersVariant>,
) -> Result<DecoderLayers, Error> {
    match variant {
        None => DecoderLayers::plan(device, case.problem),
        Some(variant) => {
            let kernel = DecoderLayersKernel { variant, blocks: case.blocks() };
            DecoderLayers::plan_with(device, case.problem, kernel)
        }
    }
}

/// Runs, one after the other; what each leaves is checked, and returned.
fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static DecoderLayersVariant>,
) -> Result<Vec<Vec<f64>>, TestCaseError> {
    let problem = case.problem;
    let DecoderLayersProblem { layers, hidden, heads_kv, max_keys, page_size, .. } = problem;
    let stream = device.stream().map_err(fail)?;
    let plan = plan(device, case, variant).map_err(fail)?;
    let mut rng = Rng::new(case.seed ^ 77);
    let numbers: Vec<Numbers> =
        (0..layers as u64).map(|layer| Numbers::new(case, case.seed ^ (layer << 8))).collect();
    let tensors: Result<Vec<Tensors>, Error> =
        numbers.iter().map(|numbers| Tensors::new(&stream, case, numbers)).collect();
    let mut tensors = tensors.map_err(fail)?;
    let tables = RopeTables::new(&stream, &inv_freq(HEAD_DIM), 1.0, MAX_POSITION).map_err(fail)?;
    let [cos, sin] = angles(&stream, &tables).map_err(fail)?;
    // The pages of the sequence in any order.
    let num_slots = case.num_slots();
    let pages = page_size.map(|size| {
        let mut pages: Vec<u32> = (0..(num_slots / size) as u32).collect();
        for i in (1..pages.len()).rev() {
            pages.swap(i, rng.below(i + 1));
        }
        pages
    });
    let slot_of = |key: usize| match (&pages, page_size) {
        (Some(pages), Some(size)) => pages[key / size] as usize * size + key % size,
        _ => key,
    };
    let table = pages.as_ref().map(|pages| Tensor::from_slice(&stream, &[1, pages.len()], pages));
    let table = table.transpose().map_err(fail)?;
    let width = heads_kv * HEAD_DIM;
    let mut caches: Vec<[Vec<f64>; 2]> = numbers.iter().map(|numbers| numbers.caches.clone()).collect();
    let mut outs = Vec::new();
    for turn in 0..case.runs {
        let keys = case.keys + turn;
        let position = rng.below(MAX_POSITION + 2);
        // Now and then it leaves nothing.
        let slot = if rng.below(4) == 0 { num_slots } else { slot_of(keys) };
        let x = values(Values::Normal, DTYPE, hidden, case.seed ^ 1000 ^ turn as u64);
        let x_row = Rows::input(&stream, DTYPE, &x, hidden, Layout::default()).map_err(fail)?;
        let mut out = Rows::output(&stream, DTYPE, 1, hidden, Layout::default()).map_err(fail)?;
        let one = |value: usize| Tensor::from_slice(&stream, &[1], &[value as u32]).map_err(fail);
        // 0 keys are as one, the token's own; more than there can be as many as there can be.
        let len = match (keys, keys + 1 == max_keys) {
            (0, _) => rng.below(2),
            (_, true) => keys + 1 + rng.below(3),
            _ => keys + 1,
        };
        let (position_tensor, slot_tensor, len_tensor) = (one(position)?, one(slot)?, one(len)?);
        let own: Result<Vec<_>, Error> = tensors.iter_mut().map(|tensors| tensors.layer(&problem)).collect();
        let args = DecoderLayersArgs {
            x: x_row.view(),
            layers: &mut own.map_err(fail)?,
            positions: position_tensor.view(),
            tables: &tables,
            slots: slot_tensor.view(),
            lens: len_tensor.view(),
            pages: table.as_ref().map(Tensor::view),
            out: out.view_mut(),
        };
        plan.run(&stream, args).map_err(fail)?;

        let half = HEAD_DIM / 2;
        let at = position.min(MAX_POSITION - 1) * half;
        let angles = (&cos[at..at + half], &sin[at..at + half]);
        let before: Vec<[Vec<f64>; 2]> = caches
            .iter()
            .map(|caches| {
                caches.each_ref().map(|cache| {
                    (0..keys).flat_map(|key| &cache[slot_of(key) * width..][..width]).copied().collect()
                })
            })
            .collect();
        let own: Vec<Layer<'_>> = std::iter::zip(&numbers, &before)
            .map(|(numbers, [k, v])| Layer {
                qkv: &numbers.qkv,
                o: &numbers.o,
                gate_up: &numbers.gate_up,
                down: &numbers.down,
                input_norm: &numbers.norms[0],
                post_attention_norm: &numbers.norms[1],
                qk_norms: problem.qk_norm.then(|| numbers.qk_norms.each_ref().map(Vec::as_slice)),
                cache: [k, v],
            })
            .collect();
        let want: Outcome = decoder_layers::<f64>(&x, &own, angles, &problem, |value| value);
        let naive = decoder_layers::<f32>(&x, &own, angles, &problem, store(DTYPE));
        let what = format!("{device:?}, run {turn}");
        let got = out.read(&stream)?;
        let tolerance = |cols| Tolerance::new(DTYPE, Scale::Rows(cols), 4 * hidden * layers);
        check(&what, &got, &want.out, &naive.out, &tolerance(hidden))?;
        for (layer, tensors) in tensors.iter().enumerate() {
            for kind in 0..2 {
                let now = tensors.caches[kind].read(&stream)?;
                let expected = &mut caches[layer][kind];
                if slot < num_slots {
                    let own = slot * width..(slot + 1) * width;
                    let what = format!("{what}, layer {layer}, {}", ["keys", "values"][kind]);
                    let (want, naive) = (&want.kept[layer][kind], &naive.kept[layer][kind]);
                    check(&what, &now[own.clone()], want, naive, &tolerance(HEAD_DIM))?;
                    // The next run begins with what is there.
                    expected[own.clone()].copy_from_slice(&now[own]);
                }
                prop_assert_eq!(&now, expected, "other slots");
            }
        }
        outs.push(got);
    }
    Ok(outs)
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards.iter().filter(|device| runs(device, Arch::Sm90a)) {
        for variant in VARIANTS {
            if wanted(variant.entry) && plan(device, case, Some(variant)).is_ok() {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// The one size that can be 0: keys before the token; of the smallest layers.
pub fn nothing() -> Result<(), TestCaseError> {
    let smallest = |case: &mut Case| {
        case.problem = DecoderLayersProblem::new(1, [32, 32], [1, 1], case.runs, DTYPE, 1e-6);
        (case.keys, case.more_blocks) = (0, 0);
    };
    through_every_kernel("decoder_layers", &[smallest], case(), Case::work, run_variants)
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("decoder_layers", case(), Case::work, run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(48))]

    /// On the CPU, and on a card with all of its multiprocessors.
    #[test]
    fn planned(case in case()) {
        for device in devices().into_iter().filter(|device| !is_simulated(device)) {
            let fits = device.limits().is_none_or(|limits| select(&limits, &case.problem).is_ok());
            if fits {
                run(&device, &case, None)?;
            }
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// The same bits again, by another plan.
    #[test]
    fn deterministic((case, on) in on_executors(case, Case::work)) {
        for device in on.cards().into_iter().filter(|device| runs(device, Arch::Sm90a)) {
            for variant in VARIANTS {
                if plan(&device, &case, Some(variant)).is_ok() {
                    let (first, second) = (run(&device, &case, Some(variant))?, run(&device, &case, Some(variant))?);
                    for (first, second) in std::iter::zip(first, second) {
                        check_bits_eq(&first, &second).map_err(fail)?;
                    }
                }
            }
        }
    }
}

/// Problems that are refused, by the words of the message.
#[test]
fn bad_problems() {
    let good = DecoderLayersProblem::new(2, [64, 96], [4, 2], 16, DTYPE, 1e-6);
    let table: [(DecoderLayersProblem, &str); 8] = [
        (DecoderLayersProblem { layers: 0, ..good }, "1 to 40 layers, got 0"),
        (DecoderLayersProblem { layers: 41, ..good }, "1 to 40 layers, got 41"),
        (DecoderLayersProblem { hidden: 48, ..good }, "hidden a multiple of 32"),
        (DecoderLayersProblem { intermediate: 0, ..good }, "intermediate a multiple of 32"),
        (DecoderLayersProblem { heads_q: 3, ..good }, "3 query heads, 2 key heads"),
        (DecoderLayersProblem { max_keys: 0, ..good }, "max_keys of at least 1"),
        (DecoderLayersProblem { page_size: Some(7), ..good }, "a page_size of"),
        (DecoderLayersProblem { dtype: DType::F16, ..good }, "dtype bf16"),
    ];
    for (problem, words) in table {
        let message = DecoderLayers::plan(&Device::cpu(), problem).unwrap_err().to_string();
        assert!(message.starts_with("decoder_layers: problem: ") && message.contains(words), "{message}");
    }
    assert!(DecoderLayers::plan(&Device::cpu(), good).is_ok());
    let few = DecoderLayersKernel { variant: &VARIANTS[0], blocks: 2 };
    let message = DecoderLayers::plan_with(&Device::cpu(), good, few).unwrap_err().to_string();
    assert!(message.contains(&format!("at most {MAX_ROWS} rows")), "{message}");
    assert!(MAX_ROWS.is_multiple_of(TILE_ROWS));
}
