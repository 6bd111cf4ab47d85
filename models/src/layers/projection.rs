//! Linear layers whose weight may be quantised.

use super::Phase;
use crate::loader::Loader;
use crate::part::Cut;
use host::ops::glu::Activation;
use host::ops::grouped_matmul::{GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem};
use host::ops::matmul::{Act, Epilogue, Matmul, MatmulArgs, MatmulB, MatmulProblem, Residual, RowNorm};
use host::weight::{Layout, Weight};
use host::{Constant, Error, Kernel, OptimizationReport, Stream, TensorView, TensorViewMut};

/// `y = x · weightᵀ (+ bias)`, the weight as the checkpoint has it, quantised or not.
#[derive(Debug)]
pub struct Projection {
    /// The weight.
    pub weight: ProjectionWeight,
    /// `[out]`.
    pub bias: Option<Constant>,
}

/// The weight of a projection, or those of all experts.
#[derive(Debug)]
pub enum ProjectionWeight {
    /// `[out, in]`; of experts `[experts, out, in]`.
    Plain(Constant),
    /// Packed, in parts whose rows are above each other: one, or several where their layouts differ. Of a gate and up,
    /// one with the rows of both in turn.
    Packed(Vec<Weight>),
    /// int8, for rows that become int8 too ([`host::ops::matmul::Activations::Int8`]). Of a gate and up above each
    /// other.
    Int8 {
        /// `[out, in]` i8.
        codes: Constant,
        /// `[out]` f32: what 1 means in each row.
        scales: Constant,
    },
    /// Parts of different kinds whose rows are above each other, none of them such parts itself.
    Mixed(Vec<ProjectionWeight>),
}

/// What the plans of a projection depend on: nothing of a plain weight, rows and form of each part of another, which
/// has none if it is plain.
pub(crate) type ProjectionKind = Vec<(usize, Option<Form>)>;

/// How a weight is quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Form {
    Packed(Layout),
    Int8,
}

impl Projection {
    /// Several projections of the same input as one: their rows above each other.
    pub(crate) fn new(
        loader: &mut Loader<'_>,
        parts: &[(&str, Cut)],
        cols: &Cut,
        bias: bool,
    ) -> Result<Self, Error> {
        let named = |suffix: &str| -> Vec<(String, Cut)> {
            parts.iter().map(|(name, rows)| (format!("{name}.{suffix}"), rows.clone())).collect()
        };
        let weight = loader.projection(&named("weight"), cols)?;
        let bias = if bias { Some(loader.vectors(&named("bias"))?) } else { None };
        Ok(Projection { weight, bias })
    }

    /// The same with the rows of others below, which stay floats whatever becomes of the first ones.
    pub(crate) fn beside_floats(
        loader: &mut Loader<'_>,
        [parts, floats]: [&[(String, Cut)]; 2],
        cols: &Cut,
    ) -> Result<Self, Error> {
        let [parts, floats] = [parts, floats].map(|parts| {
            parts.iter().map(|(name, rows)| (format!("{name}.weight"), rows.clone())).collect::<Vec<_>>()
        });
        let weight = loader.projection_beside(&parts, &floats, cols)?;
        Ok(Projection { weight, bias: None })
    }

    /// A gate and up, these rows of each.
    pub(crate) fn gate_up(
        loader: &mut Loader<'_>,
        parts: [&str; 2],
        rows: &Cut,
        cols: &Cut,
    ) -> Result<Self, Error> {
        let weight = loader.gate_up(&parts.map(|name| (format!("{name}.weight"), rows.clone())), cols)?;
        Ok(Projection { weight, bias: None })
    }

    /// What plans depend on.
    pub(crate) fn kind(&self) -> ProjectionKind {
        self.weight.kind()
    }

    /// Whether the rows of its parts, a gate and up, are in turn, and not above each other.
    pub(crate) fn is_in_turn(&self) -> bool {
        matches!(self.weight, ProjectionWeight::Packed(_))
    }

    /// Bytes of the weight.
    pub fn bytes(&self) -> usize {
        self.weight.bytes()
    }
}

impl ProjectionWeight {
    /// What plans depend on.
    pub(crate) fn kind(&self) -> ProjectionKind {
        match self {
            ProjectionWeight::Plain(_) => Vec::new(),
            ProjectionWeight::Packed(parts) => {
                parts.iter().map(|part| (part.n(), Some(Form::Packed(part.layout())))).collect()
            }
            ProjectionWeight::Int8 { scales, .. } => vec![(scales.view().len(), Some(Form::Int8))],
            ProjectionWeight::Mixed(parts) => parts
                .iter()
                .flat_map(|part| match part {
                    ProjectionWeight::Plain(weight) => vec![(weight.shape()[0], None)],
                    other => other.kind(),
                })
                .collect(),
        }
    }

    /// How it is packed, if it is, in one part.
    pub(crate) fn layout(&self) -> Option<Layout> {
        match self {
            ProjectionWeight::Packed(parts) => Some(parts[0].layout()),
            _ => None,
        }
    }

    /// Whether it is one operand of a product whose rows are taken as they are.
    pub(crate) fn is_operand(&self) -> bool {
        match self {
            ProjectionWeight::Plain(_) => true,
            ProjectionWeight::Packed(parts) => matches!(&parts[..], [one] if !one.layout().permuted),
            ProjectionWeight::Int8 { .. } | ProjectionWeight::Mixed(_) => false,
        }
    }

    /// As the operand of a product, of a weight in one part.
    pub(crate) fn operand(&self) -> MatmulB<'_> {
        self.operand_of(0)
    }

    /// How many products it is multiplied in.
    fn products(&self) -> usize {
        match self {
            ProjectionWeight::Plain(_) | ProjectionWeight::Int8 { .. } => 1,
            ProjectionWeight::Packed(parts) => parts.len(),
            ProjectionWeight::Mixed(parts) => parts.iter().map(ProjectionWeight::products).sum(),
        }
    }

    /// As the operand of one of them.
    fn operand_of(&self, mut part: usize) -> MatmulB<'_> {
        match self {
            ProjectionWeight::Plain(weight) => weight.view().into(),
            ProjectionWeight::Packed(parts) => (&parts[part]).into(),
            ProjectionWeight::Int8 { codes, scales } => {
                MatmulB::Int8 { codes: codes.view(), scales: scales.view() }
            }
            ProjectionWeight::Mixed(parts) => {
                let mut at = 0;
                while part >= parts[at].products() {
                    part -= parts[at].products();
                    at += 1;
                }
                parts[at].operand_of(part)
            }
        }
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        match self {
            ProjectionWeight::Plain(weight) => weight.bytes(),
            ProjectionWeight::Packed(parts) => parts.iter().map(Weight::bytes).sum(),
            ProjectionWeight::Int8 { codes, scales } => codes.bytes() + scales.bytes(),
            ProjectionWeight::Mixed(parts) => parts.iter().map(ProjectionWeight::bytes).sum(),
        }
    }
}

/// The products of a projection, planned for one phase.
#[derive(Debug)]
pub(crate) struct ProjectionPlan {
    /// Of each part, with its columns of out.
    parts: Vec<(Matmul, usize)>,
}

impl ProjectionPlan {
    /// `[tokens, k] · [n, k]ᵀ`.
    pub(crate) fn new(phase: &Phase<'_>, weights: &Projection, n: usize, k: usize) -> Result<Self, Error> {
        let (kind, bias) = (weights.kind(), weights.bias.is_some());
        let part = |rows: usize, form| Ok((phase.product(rows, k, bias, Act::None, form)?, rows));
        let parts = match kind.is_empty() {
            true => vec![part(n, None)?],
            false => kind.into_iter().map(|(rows, form)| part(rows, form)).collect::<Result<_, Error>>()?,
        };
        Ok(ProjectionPlan { parts })
    }

    /// The same, added to what is in out.
    pub(crate) fn onto(phase: &Phase<'_>, weights: &Projection, n: usize, k: usize) -> Result<Self, Error> {
        let (kind, bias) = (weights.kind(), weights.bias.is_some());
        if kind.iter().any(|&(_, form)| form == Some(Form::Int8)) {
            let expected = "none over weights whose rows become int8; or load these with \
                            Checkpoint::with_activations(Activations::AsGiven)";
            return Err(Error::invalid("Batch", "adapters", expected, "some"));
        }
        let part = |rows: usize, form| {
            let problem = phase.problem(rows, k, bias, Act::None, form);
            let epilogue = Epilogue { residual: true, ..problem.epilogue };
            Ok((Matmul::plan(phase.stream.device(), MatmulProblem { epilogue, ..problem })?, rows))
        };
        let parts = match kind.is_empty() {
            true => vec![part(n, None)?],
            false => kind.into_iter().map(|(rows, form)| part(rows, form)).collect::<Result<_, Error>>()?,
        };
        Ok(ProjectionPlan { parts })
    }

    /// `act([tokens, k] · gateᵀ) ⊙ ([tokens, k] · upᵀ)`, `[n, k]` both.
    pub(crate) fn gated(
        phase: &Phase<'_>,
        weights: &Projection,
        n: usize,
        k: usize,
        activation: Activation,
    ) -> Result<Self, Error> {
        let form = weights.kind().first().and_then(|&(_, form)| form);
        Ok(ProjectionPlan { parts: vec![(phase.product(n, k, false, Act::Gated(activation), form)?, n)] })
    }

    /// The same, `[n, k]`, of a part of a layer that works on the residual itself: of the residual behind its norm, or
    /// added to it. None where no part does, and where there is no kernel for that.
    pub(crate) fn in_place(
        phase: &Phase<'_>,
        (weights, [n, k], act): (&Projection, [usize; 2], Act),
        norm: Option<RowNorm>,
    ) -> Result<Option<Self>, Error> {
        if !phase.may_work_in_place() {
            return Ok(None);
        }
        let part = |rows, form| {
            let mut problem = phase.problem(rows, k, weights.bias.is_some(), act, form);
            problem.norm = norm;
            problem.epilogue.residual = norm.is_none();
            problem
        };
        let problems: Vec<MatmulProblem> = match &weights.kind()[..] {
            [] => vec![part(n, None)],
            // A gate's and up's rows are in one part.
            &[(_, form)] => vec![part(n, form)],
            kind => kind.iter().map(|&(rows, form)| part(rows, form)).collect(),
        };
        let device = phase.stream.device();
        if problems.iter().any(|problem| Matmul::supports(device, problem).is_err()) {
            return Ok(None);
        }
        let parts = problems.into_iter().map(|problem| Ok((Matmul::plan(device, problem)?, problem.n)));
        Ok(Some(ProjectionPlan { parts: parts.collect::<Result<_, Error>>()? }))
    }

    pub(crate) fn reports(&self) -> impl Iterator<Item = OptimizationReport> + use<'_> {
        self.parts.iter().map(|(plan, _)| plan.optimization_report())
    }

    pub(crate) fn run(
        &self,
        stream: &Stream,
        weights: &Projection,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        self.run_fused(stream, weights, (x, None), (out, None))
    }

    /// The same with a norm of x before, or added to what is in out, as planned.
    pub(crate) fn run_fused(
        &self,
        stream: &Stream,
        weights: &Projection,
        (x, gain): (TensorView<'_>, Option<TensorView<'_>>),
        (mut out, residual): (TensorViewMut<'_>, Option<Residual<'_>>),
    ) -> Result<(), Error> {
        let mut start = 0;
        for (part, (plan, cols)) in self.parts.iter().enumerate() {
            let end = start + cols;
            let bias = match &weights.bias {
                Some(bias) => Some(bias.view().slice(0, start..end)?),
                None => None,
            };
            let out = out.reborrow().slice(1, start..end)?;
            let args = MatmulArgs::new(x, weights.weight.operand_of(part), out);
            plan.run(stream, MatmulArgs { gain, bias, residual, ..args })?;
            start = end;
        }
        Ok(())
    }
}

/// The products of all experts, planned for one phase.
#[derive(Debug)]
pub(crate) struct ExpertsPlan {
    /// Of each part of the weights, with its columns of out.
    parts: Vec<(GroupedMatmul, usize)>,
}

impl ExpertsPlan {
    /// Of a problem that says nothing of how the weights are packed.
    pub(crate) fn new(
        phase: &Phase<'_>,
        weights: &ProjectionWeight,
        problem: GroupedMatmulProblem,
    ) -> Result<Self, Error> {
        let part = |n: usize, weight| {
            let activations = phase.activations;
            let problem = GroupedMatmulProblem { n, weight, activations, ..problem };
            Ok((GroupedMatmul::plan(phase.stream.device(), problem)?, n))
        };
        let parts = match weights {
            ProjectionWeight::Packed(parts) => {
                parts.iter().map(|own| part(own.n(), Some(own.layout()))).collect::<Result<_, Error>>()?
            }
            // Experts are nothing else.
            _ => vec![part(problem.n, None)?],
        };
        Ok(ExpertsPlan { parts })
    }

    pub(crate) fn reports(&self) -> impl Iterator<Item = OptimizationReport> + use<'_> {
        self.parts.iter().map(|(plan, _)| plan.optimization_report())
    }

    /// Runs the products of rows that `offsets` share out, which `order` names if they are gathered.
    pub(crate) fn run(
        &self,
        stream: &Stream,
        weights: &ProjectionWeight,
        (x, offsets, order): (TensorView<'_>, TensorView<'_>, Option<TensorView<'_>>),
        mut out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let mut start = 0;
        for (part, (plan, cols)) in self.parts.iter().enumerate() {
            let end = start + cols;
            let out = out.reborrow().slice(1, start..end)?;
            let args = GroupedMatmulArgs::new(x, weights.operand_of(part), offsets, out);
            plan.run(stream, GroupedMatmulArgs { order, ..args })?;
            start = end;
        }
        Ok(())
    }
}
