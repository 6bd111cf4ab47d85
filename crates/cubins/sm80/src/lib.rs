//! The kernels of `warpforge` for sm_80, assembled by `ptxas`: of no use by itself.

/// The folder that holds them; there is none in a checkout.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/cubins");
