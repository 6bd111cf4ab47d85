//! Plans that are kept from call to call: candle's operators have nowhere to keep one.

use std::sync::{Arc, Mutex, PoisonError};

use host::{Device, Error, Place};

/// Plans that are kept of an operator. A model has few of each; those used last stay.
const KEPT: usize = 32;

/// The plans of an operator, those used last at the end.
pub(crate) struct Plans<Problem, Plan>(Mutex<Vec<Kept<Problem, Plan>>>);

struct Kept<Problem, Plan> {
    place: Place,
    problem: Problem,
    plan: Arc<Plan>,
}

impl<Problem: PartialEq + Copy, Plan> Plans<Problem, Plan> {
    pub(crate) const fn new() -> Self {
        Plans(Mutex::new(Vec::new()))
    }

    /// The plan of this problem on this device, made now if there is none.
    pub(crate) fn of(
        &self,
        device: &Device,
        problem: Problem,
        plan: impl FnOnce(&Device, Problem) -> Result<Plan, Error>,
    ) -> Result<Arc<Plan>, Error> {
        let place = device.place();
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.iter().position(|kept| kept.place == place && kept.problem == problem);
        let found = match found {
            Some(index) => kept.remove(index),
            None => Kept { place, problem, plan: Arc::new(plan(device, problem)?) },
        };
        let plan = Arc::clone(&found.plan);
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push(found);
        Ok(plan)
    }
}

/// The most that is planned for so many: a run may have fewer, and of a length that grows call by call there are few
/// plans then.
pub(crate) fn most(count: usize) -> usize {
    count.checked_next_power_of_two().unwrap_or(count)
}
