//! Experts with packed weights: every layout, by every kernel, against the values that the layout stands for.

use abi::weight::{Codes, Layout as WeightLayout, ScaleType};
use proptest::prelude::*;
use proptest::sample::select;
use testkit::strategies::dims_from;
use warpforge::ops::fused_moe::{FusedMoe, FusedMoeStage, PACKED_VARIANTS, PackedFusedMoeVariant};
use warpforge::weight::{GateUp, RowScales, Weight, WeightSource};

use super::*;
use crate::matmul::packed::{Source, layouts};

/// Sources of the experts' gate and up, and down; of the shared expert's gate, up and down.
struct Sources {
    gate_up: Vec<Source>,
    down: Vec<Source>,
    shared: [Source; 3],
}

#[derive(Clone, Debug)]
struct PackedCase {
    case: Case,
    /// Of gate and up, and of down, as the sources have them; none: plain matrices.
    layouts: [Option<WeightLayout>; 2],
}

fn packed() -> impl Strategy<Value = PackedCase> {
    let sizes = (dims_from(1, &[16, 64, 128], 200), 1usize..7);
    let some = || prop_oneof![5 => select(layouts()).prop_map(Some), 1 => Just(None)];
    (case(), sizes, some(), select(layouts()), any::<bool>()).prop_map(
        |(mut case, (hidden, blocks), first, second, swaps)| {
            (case.problem.hidden, case.problem.inner) = (hidden, 16 * blocks);
            case.problem.tokens = case.problem.tokens.min(3);
            case.kind = Values::Normal;
            let mut layouts = [first, Some(second)];
            if swaps {
                layouts.swap(0, 1);
            }
            PackedCase { case, layouts }
        },
    )
}

/// As the weight of so many rows has it: each row has a scale of its own where a block would end inside of it.
fn layout_of(layout: WeightLayout, rows: usize) -> WeightLayout {
    let is_whole = rows.is_multiple_of(layout.rows as usize);
    WeightLayout { rows: if is_whole { layout.rows } else { 1 }, ..layout }
}

fn pack(stream: &Stream, sources: &[Source]) -> Result<Weight, TestCaseError> {
    let [rows, _] = sources[0].size();
    let weight = if layout_of(sources[0].layout(), rows) == sources[0].layout() {
        Weight::pack_experts(stream, sources.len(), |expert| Ok(&sources[expert]))
    } else {
        Weight::pack_experts(stream, sources.len(), |expert| Ok(RowScales(&sources[expert])))
    };
    weight.map_err(fail)
}

impl PackedCase {
    fn work(&self) -> usize {
        let FusedMoeProblem { tokens, top_k, hidden, inner, .. } = self.case.problem;
        let padded = hidden.next_multiple_of(64) * inner.next_multiple_of(64);
        self.case.work() + 20 * (tokens * (top_k + 1) + 1) * padded
    }

    fn problem(&self) -> FusedMoeProblem {
        let FusedMoeProblem { hidden, inner, shared, .. } = self.case.problem;
        let [gate_up, down] = self.layouts;
        let of_shared = |layout: Option<WeightLayout>| layout.filter(|_| shared);
        FusedMoeProblem {
            gate_up: gate_up.map(|layout| layout_of(layout, 2 * inner)),
            down: down.map(|layout| layout_of(layout, hidden)),
            shared_gate_up: of_shared(gate_up).map(|layout| GateUp::layout_of(layout_of(layout, inner))),
            shared_down: of_shared(down).map(|layout| layout_of(layout, hidden)),
            ..self.case.problem
        }
    }

    fn sources(&self) -> Sources {
        let FusedMoeProblem { experts, hidden, inner, .. } = self.case.problem;
        // Of plain matrices any will do.
        let [gate_up, down] = self.layouts.map(|layout| layout.unwrap_or(layouts()[0]));
        let source = |size, layout, salt: u64| Source::new(size, layout, self.case.seed ^ salt << 8);
        let of_experts = |size, layout, salt: u64| {
            let each = |expert: usize| {
                let mut source = source(size, layout, salt + 8 * expert as u64);
                // Each expert has its own.
                source.global *= 1.0 + (expert % 4) as f32;
                source
            };
            (0..experts).map(each).collect()
        };
        Sources {
            gate_up: of_experts([2 * inner, hidden], gate_up, 1),
            down: of_experts([hidden, inner], down, 2),
            shared: [
                source([inner, hidden], gate_up, 3),
                source([inner, hidden], gate_up, 4),
                source([hidden, inner], down, 5),
            ],
        }
    }

    /// The inputs with these weights, and the sizes of all terms.
    fn inputs(&self, device: &Device, sources: &Sources) -> Result<[Inputs; 2], TestCaseError> {
        let mut inputs = Inputs::of(&self.case).routed(device, &self.case)?;
        // So that f16 has room for what codes of 8 bits come to.
        for value in inputs.x.iter_mut().chain(&mut inputs.gain) {
            *value *= 0.125;
        }
        if self.case.in_place {
            inputs.out.clone_from(&inputs.x);
        }
        let Sources { gate_up, down, shared: [gate, up, shared_down] } = sources;
        let mut absolute = inputs.absolute();
        let all = |sources: &[Source], of: fn(&Source) -> Vec<f64>| sources.iter().flat_map(of).collect();
        for (inputs, of) in
            [(&mut inputs, Source::values as fn(&Source) -> _), (&mut absolute, Source::sizes)]
        {
            if self.layouts[0].is_some() {
                inputs.gate_up = all(gate_up, of);
                inputs.shared[0] = [of(gate), of(up)].concat();
            }
            if self.layouts[1].is_some() {
                inputs.down = all(down, of);
                inputs.shared[1] = of(shared_down);
            }
        }
        Ok([inputs, absolute])
    }

    fn run(&self, device: &Device) -> Result<(), TestCaseError> {
        let sources = self.sources();
        let [inputs, absolute] = self.inputs(device, &sources)?;
        let case = Case { problem: self.problem(), ..self.case.clone() };
        let got = self.product(device, &case, &sources, &inputs)?;
        expect(&format!("{device:?}"), &case, &inputs, &absolute, &got)
    }

    /// What a plan makes of the case's inputs and the sources' weights.
    fn product(
        &self,
        device: &Device,
        case: &Case,
        sources: &Sources,
        inputs: &Inputs,
    ) -> Result<Vec<f64>, TestCaseError> {
        let FusedMoeProblem { experts, hidden, inner, dtype, .. } = self.case.problem;
        let stream = device.stream().map_err(fail)?;
        let plain = |shape: &[usize], values: &[f64]| {
            let bytes = testkit::round::encode(dtype, values);
            Tensor::from_bytes(&stream, shape, dtype, &bytes).map_err(fail)
        };
        let Sources { gate_up, down, shared: [gate, up, shared_down] } = sources;
        let is_packed = self.layouts.map(|layout| layout.is_some());
        let matrices = [
            plain(&[experts, 2 * inner, hidden], if is_packed[0] { &[] } else { &inputs.gate_up }),
            plain(&[experts, hidden, inner], if is_packed[1] { &[] } else { &inputs.down }),
            plain(&[2 * inner, hidden], if is_packed[0] { &[] } else { &inputs.shared[0] }),
            plain(&[hidden, inner], if is_packed[1] { &[] } else { &inputs.shared[1] }),
        ];
        let gate_up_of_shared = if layout_of(gate.layout(), inner) == gate.layout() {
            Weight::pack(&stream, &GateUp(gate, up))
        } else {
            Weight::pack(&stream, &GateUp(&RowScales(gate), &RowScales(up)))
        };
        let weights = [
            pack(&stream, gate_up)?,
            pack(&stream, down)?,
            gate_up_of_shared.map_err(fail)?,
            pack(&stream, std::slice::from_ref(shared_down))?,
        ];
        let operand = |index: usize| -> Result<MatmulB<'_>, TestCaseError> {
            if is_packed[index % 2] {
                Ok((&weights[index]).into())
            } else {
                Ok(matrices[index].as_ref().map_err(Clone::clone)?.view().into())
            }
        };
        let operands = ([operand(0)?, operand(1)?], [operand(2)?, operand(3)?]);
        apply(&stream, case, None, inputs, operands)
    }

    /// The kernels that a card takes: of each stage that of the longest groups.
    fn kernels(&self) -> impl Iterator<Item = &'static str> + use<> {
        let problem = self.problem();
        let stages = [
            (FusedMoeStage::Up, [problem.gate_up, problem.shared_gate_up]),
            (FusedMoeStage::Down, [problem.down, problem.shared_down]),
        ];
        stages.into_iter().filter_map(move |(stage, layouts)| {
            let takes = |variant: &&PackedFusedMoeVariant| {
                let of_layout = |layout: &WeightLayout| {
                    variant.codes == layout.codes
                        && match variant.group {
                            64 => layout.is_wide(),
                            16 => !layout.minimums,
                            group => layout.group == group,
                        }
                };
                (variant.dtype, variant.stage) == (problem.dtype, stage)
                    && layouts[0].is_some()
                    && layouts.iter().flatten().all(of_layout)
            };
            let taken = PACKED_VARIANTS.iter().filter(takes).max_by_key(|variant| variant.group);
            taken.map(|variant| variant.entry)
        })
    }
}

/// The case by the wanted kernels.
fn run_variants(cards: &[Device], case: &PackedCase, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        if case.kernels().any(wanted) && FusedMoe::supports(device, &case.problem()).is_ok() {
            case.run(device)?;
        }
    }
    Ok(())
}

fn packed_entries() -> impl Iterator<Item = &'static str> {
    abi::ops::entries("fused_moe").filter(|entry| entry.contains("packed"))
}

/// Sizes of 0, through every kernel.
pub(super) fn nothing() -> Result<(), TestCaseError> {
    through_kernels(
        packed_entries,
        &[
            |case: &mut PackedCase| case.case.problem.tokens = 0,
            |case: &mut PackedCase| case.case.problem.top_k = 0,
            |case: &mut PackedCase| case.case.problem.inner = 0,
        ],
        packed(),
        PackedCase::work,
        run_variants,
    )
}

#[test]
fn every_packed_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel_of(packed_entries(), packed(), PackedCase::work, run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// What `plan` chooses, on every device that has kernels for it.
    #[test]
    fn packed_planned((case, on) in on_executors(packed, PackedCase::work)) {
        for device in &on.devices() {
            if FusedMoe::supports(device, &case.problem()).is_ok() {
                case.run(device)?;
            }
        }
    }

    /// A token has the same bits alone as among others.
    #[test]
    fn packed_tokens_are_apart((packed, on) in on_executors(packed, |case| 2 * case.work())) {
        let (problem, sources) = (packed.problem(), packed.sources());
        let case = Case { problem, ..packed.case.clone() };
        for device in &on.devices() {
            let Some(last) = problem.tokens.checked_sub(1) else { continue };
            if FusedMoe::supports(device, &problem).is_err() {
                continue;
            }
            let [inputs, _] = packed.inputs(device, &sources)?;
            let all = packed.product(device, &case, &sources, &inputs)?;
            let alone = inputs.of_token(last, &problem);
            let one = Case { problem: FusedMoeProblem { tokens: 1, ..problem }, ..case.clone() };
            let alone = packed.product(device, &one, &sources, &alone)?;
            prop_assert_eq!(bits(&alone), bits(&all[last * problem.hidden..]), "{:?}", device);
        }
    }
}

/// What is packed, and how, is found before anything runs.
#[test]
fn packed_bad_input() {
    let layout = WeightLayout {
        codes: Codes::Int4,
        group: 128,
        rows: 1,
        scale: ScaleType::Bf16,
        zeros: false,
        minimums: false,
        permuted: false,
    };
    let plain = FusedMoeProblem::new(1, [2, 3], [64, 32], DType::BF16);
    let problem = FusedMoeProblem { gate_up: Some(layout), down: Some(layout), ..plain };
    for device in &devices() {
        let refused =
            |problem: FusedMoeProblem| FusedMoe::supports(device, &problem).unwrap_err().to_string();
        let narrow = FusedMoeProblem { inner: 24, ..problem };
        assert_eq!(
            refused(narrow),
            "fused_moe: problem: expected an inner that is a multiple of 16, of packed weights, got 24"
        );
        for wrong in [
            FusedMoeProblem { shared: true, ..problem },
            FusedMoeProblem { shared: true, shared_gate_up: Some(layout), ..plain },
            FusedMoeProblem { shared_down: Some(layout), ..problem },
        ] {
            let expected =
                "fused_moe: problem: expected packed weights of the shared expert where the others' are";
            assert!(refused(wrong).starts_with(expected), "{}", refused(wrong));
        }
        let wide = WeightLayout { codes: Codes::E6m9, group: 0, scale: ScaleType::F32, ..layout };
        if device.limits().is_some() {
            for unknown in [
                FusedMoeProblem { down: Some(wide), ..problem },
                FusedMoeProblem { dtype: DType::F32, ..problem },
            ] {
                let expected = "fused_moe: problem: expected packed weights that kernels of f16 or bf16";
                assert!(refused(unknown).starts_with(expected), "{}", refused(unknown));
            }
        }
    }
}
