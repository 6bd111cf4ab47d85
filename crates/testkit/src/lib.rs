//! Property tests of GPU kernels, on a machine without a GPU: what the tests, benchmarks and examples of all of
//! warpforge's operators share, and what users test kernels of their own with. Nothing here knows an operator.
//!
//! | module | holds |
//! |---|---|
//! | [`compare`] | bit equality, the error bound against the f64 reference, relative L2 error |
//! | [`round`] | rounding f64 to a storage type, ulps, bytes of a storage type |
//! | [`buffer`] | buffers with guard bands and poison |
//! | [`strategies`] | proptest strategies for dimensions, strides and values; the seeded generator |
//! | [`gpu`] | what to do without a GPU, number of cases, where regression seeds are kept |
//! | [`ptx`] | reading PTX text, running `ptxas` |
//! | [`sass`] | counting instructions in what `ptxas` wrote |
//! | [`uniform`] | finding instructions of whole warps and warpgroups that part of them may not come to |
//! | [`golden`] | reference arrays from safetensors files |
//! | `simulator` | a simulated card for `host` (feature `simulator`; with the operators' kernels: `kernels`) |
//!
//! Without the features it depends on neither `host` nor `gpu`, so their unit tests can use it.
//!
//! # A property
//! A result is held to twice the error of the naive formula in the storage type, plus two units in the last place:
//!
//! ```
//! use abi::DType;
//! use proptest::prelude::*;
//! use testkit::compare::{Scale, Tolerance, check_within_naive};
//! use testkit::gpu::proptest_config;
//! use testkit::round::{round_to, widen};
//! use testkit::strategies::{dims, fill, finite_values};
//!
//! fn double(x: &[f32]) -> Vec<f32> {
//!     x.iter().map(|x| x + x).collect() // or a kernel, on a simulated card
//! }
//!
//! proptest!(proptest_config(64), |(n in dims(&[64], 300), values in finite_values(), seed in any::<u64>())| {
//!     let x = fill(values, DType::F32, n, seed);
//!     let reference: Vec<f64> = x.iter().map(|&x| 2.0 * f64::from(x)).collect();
//!     let naive: Vec<f64> = reference.iter().map(|&value| round_to(DType::F32, value)).collect();
//!     let tolerance = Tolerance::new(DType::F32, Scale::Element, 1);
//!     let agreement = check_within_naive(&widen(&double(&x)), &reference, &naive, &tolerance);
//!     prop_assert!(agreement.is_ok(), "{}", agreement.unwrap_err());
//! });
//! ```
//!
//! `tests/property.rs` of this crate is a whole test as a user writes one: a kernel, launched on simulated cards in
//! buffers with guard bands, and wrong kernels that each of these finds. `Cargo.toml` asks for
//! `warpforge-testkit = { version = "0.1", features = ["simulator"] }` among the dev-dependencies.
#![deny(unsafe_code)]

pub mod buffer;
pub mod compare;
mod element;
pub mod golden;
pub mod gpu;
pub mod ptx;
pub mod round;
pub mod sass;
#[cfg(feature = "simulator")]
pub mod simulator;
pub mod strategies;
pub mod uniform;

pub use element::Element;
