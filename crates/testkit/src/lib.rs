//! What the tests, benchmarks and examples of all operators share, and nothing that knows an operator.
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
//! | `simulator` | a simulated card for `host` (feature `simulator`) |
//!
//! Without the feature it depends on neither `host` nor `gpu`, so their unit tests can use it.
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
