//! Every instruction of `cuda_std`, in the simulator and on a card, against what it should give.
//!
//! Bits are compared where PTX defines them, errors with the documented bounds where it does not. The simulator runs
//! everywhere; a card runs the images of all floors that it can.

mod arithmetic;
mod copies;
mod hopper;
mod pages;
mod random;
mod tensor;
mod warp;
mod wgmma;

use abi::{Arch, Need};
use cuda_std::sim::tensor_core::Generation;
use probes::{Card, Case, simulate};

/// Most failures that are printed.
const SHOWN: usize = 12;

/// Where cases run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Where {
    Both,
    /// More inputs than a simulator needs to see.
    CardOnly,
}

/// Runs cases, and fails with what does not agree.
#[track_caller]
fn agree(cases: &[Case]) {
    agree_in(Where::Both, cases);
}

#[track_caller]
fn agree_in(place: Where, cases: &[Case]) {
    let mut failures = Vec::new();
    let mut note = |place: &str, case: &Case, result: Result<(), String>| {
        if let Err(text) = result {
            failures.push(format!("{} ({}) {place}: {text}", case.name, case.kernel));
        }
    };
    let floors =
        |case: &Case| Arch::ALL.into_iter().filter(move |arch| arch.runs(case.floor)).collect::<Vec<_>>();
    if place == Where::Both {
        for case in cases {
            for arch in floors(case) {
                let generation = if arch.has(Need::Tma) { Generation::Hopper } else { Generation::Ampere };
                for seed in 0..2 {
                    let output = simulate(case, arch, seed).map_err(|error| error.to_string());
                    let result = output.and_then(|output| (case.check)(generation, &output));
                    note(&format!("simulated for {arch} with seed {seed}"), case, result);
                }
            }
        }
    }
    match Card::open() {
        Err(reason) => testkit::gpu::skip(&reason.to_string()),
        Ok(card) => {
            for case in cases {
                for arch in floors(case).into_iter().filter(|arch| card.runs(*arch)) {
                    let output = card.run(case, arch).map_err(|error| error.to_string());
                    let result = output.and_then(|output| (case.check)(card.generation(), &output));
                    note(&format!("on the {} with {arch}", card.describe()), case, result);
                }
            }
        }
    }
    let rest = failures.len().saturating_sub(SHOWN);
    failures.truncate(SHOWN);
    let more = if rest > 0 { format!("\nand {rest} more") } else { String::new() };
    assert!(failures.is_empty(), "{}{more}", failures.join("\n"));
}
