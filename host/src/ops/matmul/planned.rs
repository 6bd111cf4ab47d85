//! A product that has been planned: its kernels, and how they are launched.

use super::int8::Int8;
use super::packed::PackedKernels;
use super::permute::Permuted;
use super::*;

/// A product, planned for a floor of a card, or the CPU.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(super) device: Device,
    pub(super) problem: MatmulProblem,
    pub(super) backend: Backend,
}

#[derive(Debug)]
pub(super) enum Backend {
    Cpu,
    Cuda {
        /// Kernels for every number of rows up to the planned one, fewest first, which take any address and stride.
        kernels: Vec<(MatmulChoice, Entry)>,
        /// The tensor cores' kernels, which take operands in pieces of 16 bytes, from `tensor_from` rows on.
        tensor: Vec<(&'static MatmulVariant, Entry)>,
        tensor_from: usize,
        /// The kernel of one row with constant b, if there is one.
        ahead: Option<(&'static MatmulVariant, Entry)>,
    },
    /// Rows that are normed.
    Normed(MatmulChoice, Entry),
    /// With a packed weight.
    Packed(Box<PackedKernels>),
    /// Of int8 by int8.
    Int8(Box<Int8>),
    /// With a packed weight whose columns have an order of their own.
    Permuted(Box<Permuted>),
}

impl Rung for Planned {
    const OP: &'static str = OP;
    type Problem = MatmulProblem;
    type Args<'a> = MatmulArgs<'a>;
    type Variant = &'static MatmulVariant;

    fn supports(device: &Device, problem: &MatmulProblem) -> Result<(), Error> {
        check_problem(problem)?;
        refuse_norm(device, problem)?;
        if int8::is_asked_for(problem) {
            return int8::supports(device, problem);
        }
        let Some(limits) = device.limits() else { return Ok(()) };
        if problem.norm.is_some() {
            return match &problem.weight {
                None => normed(&limits, problem).map(|_| ()),
                Some(layout) => packed_normed(&limits, problem, layout).map(|_| ()),
            };
        }
        let plain = match &problem.weight {
            None => *problem,
            Some(layout) => {
                let choices = select_packed(&limits, problem, layout);
                if choices.dense_from.is_none() {
                    return Ok(());
                }
                // Its stripes are multiplied as plain matrices.
                MatmulProblem { n: choices.stripe, weight: None, ..*problem }
            }
        };
        select(&limits, &plain).map(|_| ())
    }

    fn plan(device: &Device, problem: MatmulProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        refuse_norm(device, &problem)?;
        if int8::is_asked_for(&problem) {
            return Self::int8(device, problem);
        }
        let Some(limits) = device.limits() else {
            return Planned { device: device.clone(), problem, backend: Backend::Cpu }.permuted();
        };
        if problem.weight.is_none() && limits.is_invariant() {
            let tensor = select::invariant(&limits, &problem).into_iter().collect();
            return Self::new(device, problem, select(&limits, &problem)?, tensor, 0, None);
        }
        if let Some(layout) = &problem.weight {
            let choices = match problem.norm {
                None => select_packed(&limits, &problem, layout),
                Some(_) => packed_normed(&limits, &problem, layout)?,
            };
            return Self::with_packed(device, problem, choices);
        }
        if problem.norm.is_some() {
            return Self::normed(device, problem, normed(&limits, &problem)?);
        }
        let tensor = select::tensor(&limits, &problem);
        let from = select::tensor_min_rows(problem.dtype);
        let ahead = select::ahead(&limits, &problem);
        Self::new(device, problem, select(&limits, &problem)?, tensor, from, ahead)
    }

    fn plan_with(
        device: &Device,
        problem: MatmulProblem,
        variant: &'static MatmulVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        if int8::is_asked_for(&problem) {
            let got = "of int8 by int8, which matmul_i8 chooses kernels for";
            return Err(Error::invalid(OP, "problem", "a product of floats", got));
        }
        let Some(limits) = device.limits() else {
            return Planned { device: device.clone(), problem, backend: Backend::Cpu }.permuted();
        };
        let choice = MatmulChoice::forced(&limits, variant, &problem)?;
        match variant.tile {
            _ if problem.norm.is_some() => {
                select::check_norms(&problem, variant.tile)?;
                Self::normed(device, problem, choice)
            }
            MatmulTile::StreamNormed { .. } => {
                Err(Error::invalid(OP, "problem", "a norm of the rows, as the kernel has it", "none"))
            }
            MatmulTile::Simt { .. } | MatmulTile::Gemv { .. } => {
                Self::new(device, problem, vec![choice], Vec::new(), 0, None)
            }
            MatmulTile::Ahead { .. } => {
                let choices = select(&limits, &problem)?;
                Self::new(device, problem, choices, Vec::new(), usize::MAX, Some(variant))
            }
            _ => Self::new(device, problem, select(&limits, &problem)?, vec![variant], 0, None),
        }
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn is_repeatable(&self) -> bool {
        // A residual in place is read by each stripe of a packed weight before that is written.
        !self.problem.epilogue.residual
    }

    fn run(&self, stream: &Stream, args: &mut MatmulArgs<'_>) -> Result<(), Error> {
        let MatmulProblem { m, dtype, out_dtype, .. } = self.problem;
        let at = Check::new(OP, &self.device);
        at.stream(stream)?;
        match &self.backend {
            Backend::Int8(int8) => return int8.run(&at, (stream, &self.problem), args),
            Backend::Permuted(permuted) => return permuted.run(&at, stream, args),
            _ => {}
        }
        let Some(Launch { batch, mut dims, how, b, up }) = self.check(&at, args)? else { return Ok(()) };
        let mut args = args.reborrow();
        let weight = match args.b {
            MatmulB::Packed(weight) => Some(weight),
            MatmulB::Matrix(_) | MatmulB::Int8 { .. } => None,
        };
        if weight.is_none() {
            args.up = up;
        }
        match &self.backend {
            // No rows or columns: nothing is launched.
            Backend::Packed(_) if dims.m == 0 || dims.n == 0 => Ok(()),
            Backend::Normed(choice, entry) => {
                let gain = args.gain.is_some_and(|gain| gain.address().is_multiple_of(16));
                let ahead = matches!(choice.variant.tile, MatmulTile::Ahead { .. });
                let is_constant = dims.access & B_IS_CONSTANT != 0;
                if ahead && in_pieces(&dims, dtype) {
                    for (name, given) in [("b", Some(b)), ("up", args.up)] {
                        if given.is_some_and(|given| !given.is_constant()) {
                            return at.refuse(name, "a constant, beside a norm of a single row", "another");
                        }
                    }
                }
                if !gain || !in_pieces(&dims, dtype) || ahead && !is_constant {
                    return self.refuse_unnormed(&at, &dims);
                }
                dims.split_log2 = choice.split_log2;
                self.launch(stream, choice.variant, entry, batch, (&args, b), (dims, &how))
            }
            Backend::Packed(kernels) => {
                let Some(weight) = weight else {
                    return at.refuse("b", "a packed weight, as planned", "a matrix");
                };
                if self.problem.norm.is_some() && !kernels.norms(&dims) {
                    return self.refuse_unnormed(&at, &dims);
                }
                kernels.run(stream, (args, weight), dims, (&how, &self.norm_of(dims.k)))
            }
            Backend::Int8(_) | Backend::Permuted(_) => Ok(()),
            Backend::Cpu => {
                let activation = match self.problem.epilogue.act {
                    Act::None => None,
                    Act::Of(activation) | Act::Gated(activation) => Some(activation),
                };
                let (how, norm) = ((&how, activation), self.problem.norm);
                let few = self.device.invariance() == Invariance::Batch;
                cpu::run(dtype, out_dtype, batch, (&dims, few), (how, norm), (weight.ok_or(b), &mut args));
                Ok(())
            }
            Backend::Cuda { kernels, tensor, tensor_from, ahead } => {
                let rows = dims.m as usize;
                if let Some((variant, entry)) = ahead
                    && rows == 1
                    && dims.k <= select::ahead_max_k(&self.problem)
                    && in_pieces(&dims, dtype)
                    && dims.access & B_IS_CONSTANT != 0
                {
                    dims.split_log2 = kernels.first().map_or(0, |(choice, _)| choice.split_log2);
                    return self.launch(stream, variant, entry, batch, (&args, b), (dims, &how));
                }
                if rows >= *tensor_from
                    && let Some((variant, entry)) = self.fastest(tensor, batch, &dims)
                {
                    dims.split_log2 = self.stream_split_log2();
                    return match variant.tile {
                        MatmulTile::Wgmma { .. } | MatmulTile::Split { .. } | MatmulTile::Swapped { .. } => {
                            self.run_wgmma(stream, variant, entry, (&args, b), dims, &how)
                        }
                        _ => self.launch(stream, variant, entry, batch, (&args, b), (dims, &how)),
                    };
                }
                let Some((choice, entry)) = kernels.iter().find(|(choice, _)| rows <= choice.max_rows) else {
                    return Err(Error::invalid(
                        OP,
                        "a",
                        format!("at most {m} rows, as planned"),
                        rows.to_string(),
                    ));
                };
                dims.split_log2 = choice.split_log2;
                self.launch(stream, choice.variant, entry, batch, (&args, b), (dims, &how))
            }
        }
    }

    fn report(&self) -> OptimizationReport {
        let MatmulProblem { batch, m, n, k, dtype, out_dtype, bias, epilogue, .. } = self.problem;
        let b_rows = self.problem.b_rows();
        let [products, rows, cols, depth, b_cols] = [batch, m, n, k, b_rows].map(count);
        let bias = if bias == Bias::PerColumn { b_cols } else { count(0) };
        let (b_elements, b_bytes) = match self.problem.weight.map(|layout| layout.bits_per_weight(k as u32)) {
            Some(bits) => (count(0), count((b_rows as f64 * k as f64 * f64::from(bits) / 8.0) as usize)),
            None => (b_cols * depth, count(0)),
        };
        let operands = products * (rows * depth + b_elements) + bias;
        let outs = products * rows * cols * count(if epilogue.residual { 2 } else { 1 });
        let act = match epilogue.act {
            Act::None => String::new(),
            Act::Of(activation) => format!(", {}", activation.name()),
            Act::Gated(activation) => format!(", gated by {}", activation.name()),
        };
        let times = if batch == 1 { String::new() } else { format!("{batch} times ") };
        let work = Work {
            problem: format!("{times}[{m}, {k}] · [{b_rows}, {k}]ᵀ {dtype} to {out_dtype}{act}"),
            bytes: operands * count(dtype.bytes()) + b_bytes + outs * count(out_dtype.bytes()),
            flops: count(2) * products * rows * b_cols * depth,
        };
        match &self.backend {
            Backend::Cuda { ahead: Some((variant, entry)), .. } if m == 1 => {
                let why =
                    "one row: b is loaded before the kernel ahead has ended, where it is a constant".into();
                let cut = Cut { why, tile: format!("{:?}", variant.tile), threads: variant.tile.threads() };
                OptimizationReport::new(OP, &self.device, Some(entry), work, cut)
            }
            Backend::Cuda { tensor, kernels, .. }
                if let (true, [(variant, entry)], Some((choice, _))) =
                    (self.device.invariance() == Invariance::Batch, &tensor[..], kernels.last())
                    && in_pieces(&aligned_dims([m.max(1), b_rows, k]), dtype) =>
            {
                let (why, tile) = (choice.why.clone(), format!("{:?}", variant.tile));
                let cut = Cut { why, tile, threads: variant.tile.threads() };
                OptimizationReport::new(OP, &self.device, Some(entry), work, cut)
            }
            Backend::Cuda { tensor, tensor_from, .. }
                if m >= *tensor_from
                    && let Some((variant, entry)) =
                        self.fastest(tensor, batch as u32, &aligned_dims([m, b_rows, k])) =>
            {
                let why = select::why_of_tensor(variant.tile, tensor.len());
                let cut = Cut { why, tile: format!("{:?}", variant.tile), threads: variant.tile.threads() };
                OptimizationReport::new(OP, &self.device, Some(entry), work, cut)
            }
            Backend::Normed(choice, entry) => {
                let tile = choice.variant.tile;
                let cut = Cut { why: choice.why.clone(), tile: format!("{tile:?}"), threads: tile.threads() };
                OptimizationReport::new(OP, &self.device, Some(entry), work, cut)
            }
            Backend::Cuda { kernels, .. } if let Some((choice, entry)) = kernels.last() => {
                let tile = choice.variant.tile;
                let cut = Cut { why: choice.why.clone(), tile: format!("{tile:?}"), threads: tile.threads() };
                OptimizationReport::new(OP, &self.device, Some(entry), work, cut)
            }
            Backend::Int8(int8) => int8.report(),
            Backend::Permuted(permuted) => permuted.report(),
            Backend::Packed(kernels) => {
                let (entry, cut) = kernels.report([m, b_rows, k]);
                OptimizationReport::new(OP, &self.device, entry, work, cut)
            }
            _ => OptimizationReport::new(OP, &self.device, None, work, Cut::cpu("panels")),
        }
    }
}

impl Planned {
    fn new(
        device: &Device,
        problem: MatmulProblem,
        choices: Vec<MatmulChoice>,
        tensor: Vec<&'static MatmulVariant>,
        tensor_from: usize,
        ahead: Option<&'static MatmulVariant>,
    ) -> Result<Self, Error> {
        let load = |variant: &'static MatmulVariant| {
            let entry = device.entry(OP, variant.entry, variant.tile.smem_bytes(problem.dtype))?;
            Ok::<_, Error>(match variant.tile {
                MatmulTile::Wgmma { threads, cluster, .. }
                | MatmulTile::Split { threads, cluster, .. }
                | MatmulTile::Swapped { threads, cluster, .. } => {
                    entry.in_clusters(cluster, threads, device.profile().num_sms)?
                }
                _ => entry,
            })
        };
        let kernels = choices.into_iter().map(|choice| Ok((choice.clone(), load(choice.variant)?)));
        let kernels = kernels.collect::<Result<_, Error>>()?;
        let tensor = tensor.into_iter().map(|variant| Ok((variant, load(variant)?)));
        let tensor = tensor.collect::<Result<_, Error>>()?;
        let ahead = ahead.map(|variant| Ok::<_, Error>((variant, load(variant)?))).transpose()?;
        let backend = Backend::Cuda { kernels, tensor, tensor_from, ahead };
        Ok(Planned { device: device.clone(), problem, backend })
    }

    fn normed(device: &Device, problem: MatmulProblem, choice: MatmulChoice) -> Result<Self, Error> {
        let MatmulVariant { entry, tile, .. } = *choice.variant;
        let entry = device.entry(OP, entry, tile.smem_bytes(problem.dtype))?;
        Ok(Planned { device: device.clone(), problem, backend: Backend::Normed(choice, entry) })
    }

    pub(super) fn with_packed(
        device: &Device,
        problem: MatmulProblem,
        choices: PackedChoices,
    ) -> Result<Self, Error> {
        let backend = Backend::Packed(Box::new(PackedKernels::new(device, &problem, choices)?));
        Planned { device: device.clone(), problem, backend }.permuted()
    }

    /// The fastest of the tensor cores' kernels for a launch; none if they cannot take the operands in pieces.
    fn fastest<'a>(
        &self,
        tensor: &'a [(&'static MatmulVariant, Entry)],
        batch: u32,
        dims: &MatmulDims,
    ) -> Option<&'a (&'static MatmulVariant, Entry)> {
        let (sizes, num_sms) = ([dims.m, dims.n, dims.k], self.device.profile().num_sms);
        in_pieces(dims, self.problem.dtype)
            .then(|| select::fastest(tensor, &self.problem, batch, sizes, num_sms))
            .flatten()
    }

    /// Binary logarithm of the warps that share a column's k in the `Stream` tiles.
    fn stream_split_log2(&self) -> u32 {
        let MatmulProblem { batch, k, .. } = self.problem;
        let num_sms = self.device.profile().num_sms;
        select::stream_split_log2(num_sms, self.problem.b_rows().saturating_mul(batch), k)
    }

    fn run_wgmma(
        &self,
        stream: &Stream,
        variant: &MatmulVariant,
        entry: &Entry,
        (args, b): (&MatmulArgs<'_>, TensorView<'_>),
        mut dims: MatmulDims,
        how: &MatmulEpilogue,
    ) -> Result<(), Error> {
        let ([bm, bn], cluster) = match variant.tile {
            MatmulTile::Wgmma { bm, bn, cluster, .. } => ([bm, bn], cluster),
            MatmulTile::Split { bn, cluster, .. } => ([64, bn], cluster),
            // b's rows are the tile's.
            MatmulTile::Swapped { bm, bn, cluster, .. } => ([swapped_rows(dims.m, bn).1, bm], cluster),
            tile => return Err(Error::invalid(OP, "variant", "a tile of `wgmma`", format!("{tile:?}"))),
        };
        let MatmulArgs { a, up, bias, out, .. } = args;
        let (dtype, out_dtype) = (self.problem.dtype, self.problem.out_dtype);
        let matrix = |dtype: DType, address: u64, sizes: [u32; 3], box_rows: u32| {
            matrix_map(OP, &self.device, dtype, address, sizes, box_rows)
        };
        let (n, b_rows) = if up.is_some() { (dims.n / 2, bn / 2) } else { (dims.n, bn) };
        // The blocks of a cluster load an equal part each of what they share; of the gate and of up one has each.
        // What a block has for itself is of the rows that there are.
        let own_rows = dims.m.next_multiple_of(8).min(bm);
        let (a_box, b_box) = match (variant.tile, up) {
            (MatmulTile::Wgmma { shares_a: true, .. }, _) => (bm / cluster, b_rows),
            (MatmulTile::Wgmma { .. }, None) => (own_rows, b_rows / cluster),
            (MatmulTile::Wgmma { .. }, Some(_)) => (own_rows, b_rows),
            // They share none: each loads another part of k.
            _ => (own_rows, b_rows),
        };
        let a_map = matrix(dtype, a.address(), [dims.m, dims.k, dims.a_stride], a_box)?;
        let b_map = matrix(dtype, b.address(), [n, dims.k, dims.b_stride], b_box)?;
        let up_map = match up {
            Some(up) => matrix(dtype, up.address(), [n, dims.k, dims.b_stride], b_box)?,
            None => b_map,
        };
        // TMA loads single elements at a tensor's edge, but stores them in whole words: a tail of n that does not fill
        // 16 bytes would be written over.
        let whole_boxes = up.is_none() || bn.is_multiple_of(128);
        let persists = matches!(variant.tile, MatmulTile::Wgmma { .. });
        let in_boxes = persists
            && whole_boxes
            && out_dtype.bytes() == 2
            && n.is_multiple_of(8)
            && dims.access & OUT_IN_PIECES != 0;
        let out_map = if in_boxes {
            dims.access |= OUT_BY_TMA;
            matrix(out_dtype, out.address(), [dims.m, n, dims.out_stride], WGMMA_OUT_ROWS)?
        } else {
            a_map
        };
        let tiles = variant.tile.blocks(dims.m, dims.n, 0);
        let clusters = if persists { entry.clusters_for(tiles) } else { tiles as u32 };
        let blocks = clusters * cluster;
        let num_sms = self.device.profile().num_sms;
        dims.access |= select::next_may_start(variant.tile, dtype, blocks.into(), num_sms);
        let params = [
            (&dims).into(),
            how.into(),
            (&a_map).into(),
            (&b_map).into(),
            (&up_map).into(),
            (&out_map).into(),
            (*bias).into(),
            residual(args),
            out.into(),
            b.into(),
            up.unwrap_or(b).into(),
        ];
        // SAFETY: `check` found every row of every tensor inside its view, and the maps have its sizes and strides; the
        // blocks walk over all tiles; shared memory and clusters are the tile's.
        unsafe { entry.launch(stream, [blocks, 1, 1], [variant.tile.threads(), 1, 1], &params) }
    }

    /// A kernel with a block per tile.
    fn launch(
        &self,
        stream: &Stream,
        variant: &MatmulVariant,
        entry: &Entry,
        batch: u32,
        (args, b): (&MatmulArgs<'_>, TensorView<'_>),
        (mut dims, how): (MatmulDims, &MatmulEpilogue),
    ) -> Result<(), Error> {
        let tiles = variant.tile.blocks(dims.m, dims.n, dims.split_log2);
        let blocks = tiles * u64::from(batch);
        let num_sms = self.device.profile().num_sms;
        dims.access |= select::next_may_start(variant.tile, self.problem.dtype, blocks, num_sms);
        let MatmulArgs { a, up, bias, out, .. } = args;
        let norm = self.norm_of(dims.k);
        let params = [
            (*a).into(),
            b.into(),
            (*up).into(),
            (*bias).into(),
            residual(args),
            out.into(),
            (&dims).into(),
            how.into(),
            args.gain.into(),
            (&norm).into(),
        ];
        let params = if variant.tile.norms() { &params[..] } else { &params[..8] };
        // SAFETY: `check` found every row of every tensor inside its view and set `access` by what is aligned, which
        // `fastest` looks at for the tensor cores; the grid covers the products exactly, which `select` found to fit;
        // shared memory is the tile's.
        unsafe { entry.launch(stream, [tiles as u32, 1, batch], [variant.tile.threads(), 1, 1], params) }
    }

    /// The norm of a row of k elements, as kernels take it.
    fn norm_of(&self, k: u32) -> MatmulNorm {
        let norm = self.problem.norm.unwrap_or(RowNorm { eps: 0.0, weight: NormWeight::Plain });
        MatmulNorm { eps: norm.eps, inv_cols: 1.0 / k as f32, offset: norm.weight.offset() }
    }

    /// Why a row is not normed whose norm has been planned; nothing if there is none.
    fn refuse_unnormed(&self, at: &Check<'_>, dims: &MatmulDims) -> Result<(), Error> {
        if [dims.m, dims.n].contains(&0) {
            return Ok(());
        }
        for (name, flag) in [("a", A_IN_PIECES), ("b", B_IN_PIECES)] {
            if dims.access & flag == 0 {
                return at.refuse(name, "a view at multiples of 16 bytes, beside a norm", "another");
            }
        }
        let expected = "one at a multiple of 16 bytes, and of a single row a constant, as is b";
        at.refuse("gain", expected, "another")
    }
}

/// An error for a norm where rows are to have the same bits alone and among others: only a single row has one.
fn refuse_norm(device: &Device, problem: &MatmulProblem) -> Result<(), Error> {
    if problem.norm.is_some() && device.invariance() == Invariance::Batch {
        return Err(Error::invalid(OP, "problem", "without a norm, under Invariance::Batch", "one"));
    }
    Ok(())
}

/// The kernel that norms the rows it multiplies.
fn normed(limits: &DeviceLimits, problem: &MatmulProblem) -> Result<MatmulChoice, Error> {
    select::normed(limits, problem)?.ok_or_else(|| no_norm(limits, problem))
}

/// The kernel that norms the row it multiplies with a packed weight, and no other.
fn packed_normed(
    limits: &DeviceLimits,
    problem: &MatmulProblem,
    layout: &Layout,
) -> Result<PackedChoices, Error> {
    let choices = select_packed(limits, problem, layout);
    if choices.ahead.is_none() || problem.m > 1 {
        return Err(no_norm(limits, problem));
    }
    Ok(PackedChoices { simt: Vec::new(), mma: Vec::new(), dense_from: None, ..choices })
}

fn no_norm(limits: &DeviceLimits, problem: &MatmulProblem) -> Error {
    let expected = "without a norm, which this device or problem has no kernel for";
    let MatmulProblem { m, k, dtype, weight, .. } = problem;
    let packed = weight.map(|layout| format!(" by {layout:?}")).unwrap_or_default();
    let got = format!("[{m}, {k}] · [{}, {k}]ᵀ {dtype}{packed} on {}", problem.b_rows(), limits.floor);
    Error::invalid(OP, "problem", expected, got)
}

/// The address of the residual: null if there is none.
pub(super) fn residual<'a>(args: &MatmulArgs<'_>) -> Param<'a> {
    Param::Address(match &args.residual {
        None => 0,
        Some(Residual::InPlace) => args.out.address(),
        Some(Residual::Tensor(residual)) => residual.address(),
    })
}
