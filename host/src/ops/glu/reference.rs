//! Gated linear unit activation as plain loops: the specification.

use super::Activation;
use crate::ops::reference::Real;

/// act(gate) · up for each element; see [`super::Glu`].
///
/// `store` is the rounding of a value that is stored: the identity for the specification.
pub fn glu<A: Real>(gate: &[f64], up: &[f64], activation: Activation, store: impl Fn(A) -> A) -> Vec<f64> {
    let product = |(&gate, &up): (&f64, &f64)| store(act::<A>(activation, A::real(gate)) * A::real(up));
    std::iter::zip(gate, up).map(product).map(A::to_real).collect()
}

/// The activation of one value.
///
/// The GELUs are written so that nothing cancels for negative x, where the specification would lose digits even in f64:
/// (1 + tanh(z/2)) / 2 = 1 / (1 + e^−z), and 1 + erf(t) = erfc(−t).
pub fn act<A: Real>(activation: Activation, x: A) -> A {
    if x == A::neg_infinity() && activation != Activation::Sigmoid {
        return A::neg_zero();
    }
    let half = A::real(0.5);
    match activation {
        Activation::Silu => x / (A::one() + (-x).exp()),
        Activation::GeluTanh => x / (A::one() + (-tanh_argument(x)).exp()),
        Activation::GeluErf => {
            let t = -x * A::real(std::f64::consts::FRAC_1_SQRT_2);
            half * x * A::real(libm::erfc(t.to_real()))
        }
        Activation::Sigmoid => A::one() / (A::one() + (-x).exp()),
    }
}

/// Twice the argument of tanh in [`Activation::GeluTanh`].
fn tanh_argument<A: Real>(x: A) -> A {
    let factor = A::real(2.0 * (2.0 / std::f64::consts::PI).sqrt());
    factor * (x + A::real(0.044715) * x * x * x)
}

/// |act(gate) · up| times how much a relative error of the exponent's argument is magnified in it: e^z turns a relative
/// error d of z into |z| · d.
pub fn magnitude(gate: f64, up: f64, activation: Activation) -> f64 {
    let z = match activation {
        Activation::Silu | Activation::Sigmoid => 0.0,
        Activation::GeluTanh => tanh_argument(gate),
        Activation::GeluErf => gate * gate / 2.0,
    };
    (act(activation, gate) * up * (1.0 + z.abs())).abs()
}
