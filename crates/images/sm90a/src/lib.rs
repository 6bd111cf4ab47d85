//! The kernels of `warpforge` for sm_90a but those of attention, compiled: PTX that its build script lists, and
//! `ORIGIN`, what made it. Of no use by itself.

/// The folder that holds them; there is none in a checkout, which builds its own.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/images");
