//! A run's checks and its launch allocate nothing on the host, up to the driver's door: on a card that does nothing, so that
//! all that is counted is the library's own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use host::ops::Store;
use host::ops::attention::{
    Attention, AttentionArgs, AttentionProblem, KvScales, Mask, Offsets, ScoreTensors, Scores,
};
use host::ops::causal_conv1d::{CausalConv1d, CausalConv1dArgs, CausalConv1dProblem};
use host::ops::copy::{Copy, CopyArgs, CopyProblem};
use host::ops::embedding::{Embedding, EmbeddingArgs, EmbeddingProblem};
use host::ops::embedding_bag::{EmbeddingBag, EmbeddingBagArgs, EmbeddingBagProblem};
use host::ops::gated_delta::{GatedDelta, GatedDeltaArgs, GatedDeltaProblem};
use host::ops::glu::{Activation, Glu, GluArgs, GluProblem};
use host::ops::grouped_matmul::{GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem, GroupedRows};
use host::ops::kv_append::{KvAppend, KvAppendArgs, KvAppendProblem};
use host::ops::layernorm::{LayerNorm, LayerNormArgs, LayerNormProblem};
use host::ops::matmul::{Bias, Epilogue, Matmul, MatmulArgs, MatmulProblem, Precision};
use host::ops::matmul_i8::{
    MatmulI8, MatmulI8Args, MatmulI8Problem, QuantizeRows, QuantizeRowsArgs, QuantizeRowsProblem,
};
use host::ops::moe_combine::{MoeCombine, MoeCombineArgs, MoeCombineProblem};
use host::ops::moe_permute::{MoePermute, MoePermuteArgs, MoePermuteProblem};
use host::ops::moe_router::{MoeRouter, MoeRouterArgs, MoeRouterProblem, RouterScore, RouterWeights};
use host::ops::qk_norm_rope::{QkNorm, QkNormRope, QkNormRopeArgs, QkNormRopeProblem, QkNormWeights};
use host::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use host::ops::rope::{Rope, RopeArgs, RopeInput, RopeProblem, RopeStyle, RopeTables};
use host::ops::sampling::{Sampler, Sampling, SamplingArgs, SamplingProblem};
use host::ops::scatter_rows::{ScatterRows, ScatterRowsArgs, ScatterRowsProblem};
use host::ops::transpose::{Transpose, TransposeArgs, TransposeProblem};
use host::simulator::{Launch, Simulator, TensorMap, Tiled};
use host::{
    Arch, DType, Device, Error, HardwareProfile, Place, Stream, Tensor, TensorCores, TensorView,
    TensorViewMut,
};

/// The system's allocator, which counts.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does it all; the count is a number of the thread, which takes no allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A Hopper card that has every kernel, and does nothing.
#[derive(Debug)]
struct Idle {
    next: AtomicU64,
}

impl Simulator for Idle {
    fn profile(&self) -> HardwareProfile {
        HardwareProfile {
            name: "Idle".into(),
            place: Place::Cpu,
            compute_capability: Some((9, 0)),
            pci_bus_id: None,
            tensor_cores: TensorCores::Gen4Hopper,
            num_sms: 132,
            memory_bytes: 1 << 40,
            l2_bytes: 50 << 20,
            smem_per_block_bytes: 227 << 10,
            smem_per_sm_bytes: 228 << 10,
            registers_per_sm: 1 << 16,
            threads_per_sm: 2048,
            memory_bandwidth: 0.0,
            driver: None,
        }
    }
    fn allocate(&self, bytes: usize) -> u64 {
        self.next.fetch_add(bytes.next_multiple_of(256) as u64, Ordering::Relaxed)
    }
    fn release(&self, _address: u64) {}
    fn assign(&self, _address: u64, _block_bytes: usize, _usable: usize) {}
    fn write(&self, _address: u64, _data: &[u8]) {}
    fn read(&self, _address: u64, _data: &mut [u8]) {}
    fn fill_zero(&self, _address: u64, _bytes: usize) {}
    fn copy(&self, _from: u64, _to: u64, _bytes: usize) {}
    fn has_kernel(&self, _entry: &str) -> bool {
        true
    }
    fn tensor_map(&self, _tiled: &Tiled) -> Result<TensorMap, String> {
        Ok(TensorMap([0; 16]))
    }
    unsafe fn launch(&self, _launch: &Launch<'_>) -> Result<(), String> {
        Ok(())
    }
}

const HALF: DType = DType::BF16;

/// A device with a stream, whose tensors stay.
struct Setup {
    device: Device,
    stream: Stream,
    /// Operators whose runs were counted.
    counted: RefCell<BTreeSet<&'static str>>,
}

impl Setup {
    fn tensor(&self, shape: &[usize], dtype: DType) -> &'static mut Tensor {
        Box::leak(Box::new(Tensor::zeros(&self.stream, shape, dtype).expect("memory")))
    }

    fn input(&self, shape: &[usize], dtype: DType) -> TensorView<'static> {
        self.tensor(shape, dtype).view()
    }

    fn output(&self, shape: &[usize], dtype: DType) -> TensorViewMut<'static> {
        self.tensor(shape, dtype).view_mut()
    }

    /// Runs an operator twice, and counts what the second run allocates.
    fn count(
        &self,
        op: &'static str,
        mut run: impl FnMut(&Stream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        run(&self.stream)?;
        let before = ALLOCATIONS.get();
        run(&self.stream)?;
        let count = ALLOCATIONS.get() - before;
        assert_eq!(count, 0, "allocations of {op} on {}", self.device.describe());
        self.counted.borrow_mut().insert(op);
        Ok(())
    }
}

#[test]
fn runs_allocate_nothing() -> Result<(), Error> {
    let card = Device::simulated(Arc::new(Idle { next: AtomicU64::new(256) }))?;
    for arch in Arch::ALL {
        let device = card.with_arch(arch)?;
        let on = &Setup { stream: device.stream()?, device, counted: RefCell::default() };
        norms(on)?;
        rows(on)?;
        sampling(on)?;
        positions(on)?;
        for rows in [1, 300] {
            products(on, rows)?;
        }
        // Pairs for one block, and for more.
        for tokens in [4, 4096] {
            experts(on, tokens)?;
        }
        // Token by token, and in chunks.
        for tokens in [2, 300] {
            sequences(on, tokens)?;
        }
        for seq_q in [1, 100] {
            attention(on, seq_q, HALF, None)?;
            attention(on, seq_q, DType::F8E4M3, Some(16))?;
        }
        assert!(on.counted.borrow().iter().eq(abi::ops::FAMILIES), "{:?}", on.counted);
    }
    Ok(())
}

fn norms(on: &Setup) -> Result<(), Error> {
    let (x, vector) = (on.input(&[8, 4, 64], HALF), on.input(&[64], HALF));
    let (mut residual, mut out) = (on.output(&[8, 4, 64], HALF), on.output(&[8, 4, 64], HALF));
    let problem = RmsNormProblem { rows: 32, cols: 64, dtype: HALF, eps: 1e-6, weight: NormWeight::Plain };
    let plan = RmsNorm::plan(&on.device, problem)?;
    on.count("rmsnorm", |stream| {
        let (residual, out) = (Some(residual.reborrow()), out.reborrow());
        plan.run(stream, RmsNormArgs { x, residual, weight: vector, gate: Some(x), out })
    })?;
    let plan = LayerNorm::plan(&on.device, LayerNormProblem { rows: 32, cols: 64, dtype: HALF, eps: 1e-6 })?;
    let (x, mut out) = (x.reshape(&[32, 64])?, out.reshape(&[32, 64])?);
    on.count("layernorm", |stream| {
        let out = out.reborrow();
        plan.run(stream, LayerNormArgs { x, residual: None, weight: vector, bias: vector, out })
    })
}

fn rows(on: &Setup) -> Result<(), Error> {
    let (rows, cols, dtype) = (8, 64, HALF);
    let (tokens, vocab) = (rows, rows);
    let (x, ids) = (on.input(&[rows, cols], HALF), on.input(&[rows], DType::U32));
    let mut out = on.output(&[rows, cols], HALF);
    let plan = Glu::plan(&on.device, GluProblem { rows, cols, dtype, activation: Activation::Silu })?;
    on.count("glu", |stream| plan.run(stream, GluArgs { gate: x, up: Some(x), out: out.reborrow() }))?;
    let plan = Embedding::plan(&on.device, EmbeddingProblem { tokens, vocab, cols, dtype })?;
    on.count("embedding", |stream| plan.run(stream, EmbeddingArgs { table: x, ids, out: out.reborrow() }))?;
    let problem = EmbeddingBagProblem { tokens, bag: 4, vocab, cols, dtype, store: Store::Replace };
    let plan = EmbeddingBag::plan(&on.device, problem)?;
    let (bags, weights) = (on.input(&[tokens, 4], DType::U32), on.input(&[tokens, 4], DType::F32));
    on.count("embedding_bag", |stream| {
        plan.run(stream, EmbeddingBagArgs { table: x, ids: bags, weights, out: out.reborrow() })
    })?;
    let plan = ScatterRows::plan(&on.device, ScatterRowsProblem { rows, cols, dtype, store: Store::Add })?;
    on.count("scatter_rows", |stream| plan.run(stream, ScatterRowsArgs { x, ids, out: out.reborrow() }))?;
    let plan = Copy::plan(&on.device, CopyProblem { elements: rows * cols, src: HALF, dst: HALF })?;
    let (src, mut dst) = (x.reshape(&[2, 4, 8, 8])?.swap_axes(0, 2)?, on.output(&[8, 4, 2, 8], HALF));
    on.count("copy", |stream| plan.run(stream, CopyArgs { src, dst: dst.reborrow() }))?;
    let plan = Transpose::plan(&on.device, TransposeProblem { batch: 1, rows, cols, dtype })?;
    let (x, mut out) = (x.reshape(&[1, rows, cols])?, on.output(&[1, cols, rows], HALF));
    on.count("transpose", |stream| plan.run(stream, TransposeArgs { x, out: out.reborrow() }))
}

fn sampling(on: &Setup) -> Result<(), Error> {
    let (logits, mut ids) = (on.input(&[8, 64], DType::F32), on.output(&[8], DType::U32));
    let random = Sampling::Random { temperature: 1.0, top_k: Some(4), top_p: 0.9, seed: 1 };
    for method in [Sampling::Greedy, random] {
        let problem = SamplingProblem { rows: 8, vocab: 64, dtype: DType::F32, method };
        let plan = Sampler::plan(&on.device, problem)?;
        on.count("sampling", |stream| {
            plan.run(stream, SamplingArgs { logits, ids: ids.reborrow(), step: 3 })
        })?;
    }
    Ok(())
}

fn positions(on: &Setup) -> Result<(), Error> {
    let (tokens, heads, head_dim, rotary_dim) = (8, 2, 64, 64);
    let (style, dtype, shape) = (RopeStyle::HalfSplit, HALF, [8, 2, 64]);
    let (x, ids, weight) = (on.input(&shape, HALF), on.input(&[8], DType::U32), on.input(&[64], HALF));
    let [mut out, mut k_cache, mut v_cache] = [(); 3].map(|()| on.output(&shape, HALF));
    let tables = &RopeTables::new(&on.stream, &[1.0; 32], 1.0, 16)?;
    let plan = Rope::plan(&on.device, RopeProblem { tokens, heads, head_dim, rotary_dim, style, dtype })?;
    on.count("rope", |stream| {
        let (x, out) = (RopeInput::From(x), out.reborrow());
        plan.run(stream, RopeArgs { x, positions: ids, tables, out })
    })?;
    let plan = KvAppend::plan(&on.device, KvAppendProblem { tokens, heads, head_dim, dtype })?;
    on.count("kv_append", |stream| {
        let (k_cache, v_cache) = (k_cache.reborrow(), Some(v_cache.reborrow()));
        plan.run(stream, KvAppendArgs { k: x, v: Some(x), slots: ids, k_cache, v_cache })
    })?;
    let problem = QkNormRopeProblem {
        tokens,
        heads_q: heads,
        heads_kv: heads,
        head_dim,
        rotary_dim,
        style,
        dtype,
        cache_dtype: dtype,
        norm: Some(QkNorm { eps: 1e-6, weight: NormWeight::Plain }),
    };
    let plan = QkNormRope::plan(&on.device, problem)?;
    on.count("qk_norm_rope", |stream| {
        let args = QkNormRopeArgs {
            q: RopeInput::From(x),
            k: x,
            v: x,
            weights: Some(QkNormWeights { q: weight, k: weight }),
            positions: ids,
            tables,
            slots: ids,
            q_out: out.reborrow(),
            k_cache: k_cache.reborrow(),
            v_cache: v_cache.reborrow(),
            k_scale: None,
            v_scale: None,
        };
        plan.run(stream, args)
    })
}

fn products(on: &Setup, m: usize) -> Result<(), Error> {
    let (n, k) = (256, 128);
    let problem = MatmulProblem {
        batch: 1,
        m,
        n,
        k,
        dtype: HALF,
        out_dtype: HALF,
        precision: Precision::Full,
        bias: Bias::PerColumn,
        epilogue: Epilogue::default(),
    };
    let plan = Matmul::plan(&on.device, problem)?;
    let (a, b, bias) = (on.input(&[m, k], HALF), on.input(&[n, k], HALF), on.input(&[n], HALF));
    let mut out = on.output(&[m, n], HALF);
    on.count("matmul", |stream| {
        let out = out.reborrow();
        plan.run(stream, MatmulArgs { a, b, up: None, bias: Some(bias), residual: None, out })
    })?;
    let plan = QuantizeRows::plan(&on.device, QuantizeRowsProblem { rows: m, cols: k, dtype: HALF })?;
    let (mut q, mut scale) = (on.output(&[m, k], DType::I8), on.output(&[m], DType::F32));
    on.count("matmul_i8", |stream| {
        plan.run(stream, QuantizeRowsArgs { x: a, q: q.reborrow(), scale: scale.reborrow() })
    })?;
    let problem = MatmulI8Problem { m, n, k, out_dtype: HALF, bias: Bias::None };
    let plan = MatmulI8::plan(&on.device, problem)?;
    let (qb, b_scale) = (on.input(&[n, k], DType::I8), on.input(&[n], DType::F32));
    on.count("matmul_i8", |stream| {
        let (qa, a_scale, out) = (q.as_view(), scale.as_view(), out.reborrow());
        plan.run(stream, MatmulI8Args { qa, qb, a_scale, b_scale, bias: None, out })
    })
}

fn experts(on: &Setup, tokens: usize) -> Result<(), Error> {
    let (experts, top_k, cols, dtype) = (8, 2, 128, HALF);
    let problem = MoeRouterProblem {
        tokens,
        experts,
        top_k,
        dtype,
        score: RouterScore::Softmax,
        groups: None,
        weights: RouterWeights::Normalised,
        scale: 1.0,
        weight_dtype: DType::F32,
    };
    let plan = MoeRouter::plan(&on.device, problem)?;
    let logits = on.input(&[tokens, experts], dtype);
    let mut ids = on.output(&[tokens, top_k], DType::U32);
    let mut weights = on.output(&[tokens, top_k], DType::F32);
    on.count("moe_router", |stream| {
        let (ids, weights) = (ids.reborrow(), weights.reborrow());
        plan.run(stream, MoeRouterArgs { logits, bias: None, ids, weights })
    })?;
    let plan = MoePermute::plan(&on.device, MoePermuteProblem { tokens, top_k, experts })?;
    let mut offsets = on.output(&[experts + 1], DType::U32);
    let mut order = on.output(&[tokens * top_k], DType::U32);
    let mut positions = on.output(&[tokens, top_k], DType::U32);
    on.count("moe_permute", |stream| {
        let (offsets, order, positions) = (offsets.reborrow(), order.reborrow(), positions.reborrow());
        plan.run(stream, MoePermuteArgs { ids: ids.as_view(), offsets, order, positions })
    })?;
    let (rows, from) = (tokens * top_k, GroupedRows::Gathered { fan_out: top_k });
    let problem = GroupedMatmulProblem { rows, experts, n: cols, k: cols, dtype, from };
    let plan = GroupedMatmul::plan(&on.device, problem)?;
    let (x, w) = (on.input(&[tokens, cols], dtype), on.input(&[experts, cols, cols], dtype));
    let mut y = on.output(&[rows, cols], dtype);
    on.count("grouped_matmul", |stream| {
        let (offsets, order) = (offsets.as_view(), Some(order.as_view()));
        plan.run(stream, GroupedMatmulArgs { x, w, offsets, order, out: y.reborrow() })
    })?;
    let plan = MoeCombine::plan(&on.device, MoeCombineProblem { tokens, top_k, cols, dtype })?;
    let mut out = on.output(&[tokens, cols], dtype);
    on.count("moe_combine", |stream| {
        let (y, weights, positions) = (y.as_view(), weights.as_view(), positions.as_view());
        plan.run(
            stream,
            MoeCombineArgs { y, weights, positions, shared: None, gate: None, out: out.reborrow() },
        )
    })
}

fn sequences(on: &Setup, tokens: usize) -> Result<(), Error> {
    let (sequences, dtype) = (2, HALF);
    let (offsets, slots) = (on.input(&[3], DType::U32), on.input(&[2], DType::U32));
    let problem = CausalConv1dProblem { tokens, sequences, channels: 64, width: 4, dtype };
    let plan = CausalConv1d::plan(&on.device, problem)?;
    let (x, weight) = (on.input(&[tokens, 64], dtype), on.input(&[64, 4], dtype));
    let (mut state, mut out) = (on.output(&[2, 64, 3], dtype), on.output(&[tokens, 64], dtype));
    on.count("causal_conv1d", |stream| {
        let (state, out) = (state.reborrow(), out.reborrow());
        plan.run(stream, CausalConv1dArgs { x, weight, bias: None, offsets, slots, state, out })
    })?;
    let (heads_k, heads_v, dim_k, dim_v) = (1, 2, 64, 64);
    let problem =
        GatedDeltaProblem { tokens, sequences, longest: tokens, heads_k, heads_v, dim_k, dim_v, dtype };
    let plan = GatedDelta::plan(&on.device, problem)?;
    let (q, v) = (on.input(&[tokens, 1, 64], dtype), on.input(&[tokens, 2, 64], dtype));
    let (b, a_log) = (on.input(&[tokens, 2], dtype), on.input(&[2], DType::F32));
    let mut state = on.output(&[2, 2, 64, 64], DType::F32);
    let mut out = on.output(&[tokens, 2, 64], dtype);
    on.count("gated_delta", |stream| {
        let (state, out) = (state.reborrow(), out.reborrow());
        let args = GatedDeltaArgs { q, k: q, v, b, a: b, a_log, dt_bias: a_log, offsets, slots, state, out };
        plan.run(stream, args)
    })
}

fn attention(on: &Setup, seq_q: usize, dtype_kv: DType, page_size: Option<usize>) -> Result<(), Error> {
    let problem = AttentionProblem {
        batch: 2,
        seq_q,
        seq_kv: 128,
        heads_q: 4,
        heads_kv: 2,
        head_dim: 64,
        head_dim_v: 64,
        dtype: HALF,
        dtype_kv,
        scale: None,
        mask: Mask::Causal,
        window: None,
        scores: Scores::default(),
        page_size,
    };
    let plan = Attention::plan(&on.device, problem)?;
    let shape = page_size.map_or([2, 128, 2, 64], |page_size| [16, page_size, 2, 64]);
    let (q, k) = (on.input(&[2, seq_q, 4, 64], HALF), on.input(&shape, dtype_kv));
    let (lens, scale) = (on.input(&[2], DType::U32), on.input(&[2], DType::F32));
    let scale = (dtype_kv != HALF).then_some(scale);
    let page_table = page_size.map(|_| on.input(&[2, 8], DType::U32));
    let mut out = on.output(&[2, seq_q, 4, 64], HALF);
    on.count("attention", |stream| {
        let args = AttentionArgs {
            q,
            k,
            v: k,
            kv_lens: Some(lens),
            offsets: Offsets::default(),
            kv_scales: KvScales { k: scale, v: scale },
            out: out.reborrow(),
            lse: None,
            scores: ScoreTensors::default(),
            page_table,
        };
        plan.run(stream, args)
    })
}
