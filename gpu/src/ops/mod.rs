//! One module per operator.

#[cfg(feature = "attention")]
pub mod attention;
#[cfg(feature = "copy")]
pub mod copy;
#[cfg(feature = "embedding")]
pub mod embedding;
#[cfg(feature = "glu")]
pub mod glu;
#[cfg(feature = "kv_append")]
pub mod kv_append;
#[cfg(feature = "matmul")]
pub mod matmul;
#[cfg(feature = "matmul_i8")]
pub mod matmul_i8;
#[cfg(feature = "rmsnorm")]
pub mod rmsnorm;
#[cfg(feature = "rope")]
pub mod rope;
#[cfg(feature = "sampling")]
pub mod sampling;
#[cfg(feature = "transpose")]
pub mod transpose;
