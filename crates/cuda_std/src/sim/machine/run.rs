//! From a launch to its end: units are admitted, and one thread after the other runs.

use std::panic::{AssertUnwindSafe, catch_unwind};

use corosensei::CoroutineResult;

use super::*;

/// Runs a grid on each of the first cards, as many as there are kernels, at the same time.
pub(in crate::sim) fn run(
    memories: &mut [&mut Memory],
    launch: &Launch<'_>,
    kernels: &[&dyn Fn()],
) -> Result<Statistics, Report> {
    assert!(!is_running(), "a kernel cannot launch a kernel");
    assert!(!kernels.is_empty() && kernels.len() <= memories.len(), "a card for each kernel");
    // SAFETY: only the lifetime changes. The machine, which alone calls them, is dropped before this function returns.
    let kernel = |kernel: &&dyn Fn()| unsafe { core::mem::transmute::<&dyn Fn(), *const dyn Fn()>(*kernel) };
    let kernels: Vec<*const dyn Fn()> = kernels.iter().map(kernel).collect();
    let num_running = kernels.len();
    let memories: Vec<*mut Memory> = memories.iter_mut().map(|memory| &raw mut **memory).collect();
    let mut random = Random(launch.seed);
    let policy = [Policy::Random, Policy::Random, Policy::Newest, Policy::Mixed][random.below(4)];
    let moment = [Moment::Any, Moment::Any, Moment::Soon, Moment::Late][random.below(4)];
    let mut machine = Machine {
        memories,
        kernel_name: launch.kernel.to_owned(),
        arch: launch.arch,
        seed: launch.seed,
        grid: launch.grid,
        block: launch.block,
        cluster: launch.cluster,
        shared_bytes: launch.shared_bytes,
        kernels,
        random,
        policy,
        units: Vec::new(),
        waiting_units: Vec::new(),
        resident: 0,
        ready: Vec::new(),
        fair: false,
        current: ThreadId { slot: 0, thread: 0 },
        registers: [0; 12],
        report: None,
        lines: Lines::default(),
        pending: Vec::new(),
        moment,
        released: BTreeMap::new(),
        idle: 0,
        nanoseconds: 0,
        steps: 0,
        statistics: Statistics::default(),
    };
    if let Err(failure) = check(launch) {
        machine.fail(failure, None, None);
        return Err(machine.report.take().expect("the failure"));
    }
    let units = machine.units_per_device() * num_running as u32;
    machine.waiting_units = (0..units).collect();
    for i in (1..units as usize).rev() {
        let j = machine.random.below(i + 1);
        machine.waiting_units.swap(i, j);
    }
    let side_by_side = num_running * (1 + machine.random.below(3));
    let machine: *mut Machine = &mut machine;
    MACHINE.set(machine);
    // SAFETY: the local above, reached only through this pointer from here on, on this thread; each borrow ends before
    // a coroutine is resumed.
    unsafe {
        loop {
            while (*machine).resident < side_by_side && (*machine).admit() {}
            if (*machine).moment == Moment::Any
                && !(*machine).pending.is_empty()
                && (*machine).random.one_in(4)
            {
                (*machine).advance_any();
            }
            let Some(id) = (*machine).choose() else {
                if (*machine).advance_any() && (*machine).report.is_none() {
                    continue;
                }
                if (*machine).report.is_some()
                    || (*machine).resident == 0 && (*machine).waiting_units.is_empty()
                {
                    break;
                }
                if (*machine).admit() {
                    continue;
                }
                (*machine).stuck();
                break;
            };
            let mut coroutine = (*machine).enter(id);
            let outcome = catch_unwind(AssertUnwindSafe(|| coroutine.resume(())));
            match outcome {
                Ok(CoroutineResult::Yield(())) => {
                    (*machine).thread().coroutine = Some(coroutine);
                }
                Ok(CoroutineResult::Return(())) => {
                    let mut stacks = kept_stacks();
                    if stacks.len() < MAX_KEPT_STACKS {
                        stacks.push(coroutine.into_stack());
                    }
                    let line = (*machine).thread().line;
                    if let Err(failure) = (*machine).leave() {
                        (*machine).fail(failure, Some(id), line);
                    }
                }
                Err(panic) => {
                    let line = (*machine).thread().line;
                    let text = format!("the kernel panicked: {}", message(&*panic));
                    (*machine).fail(Failure(Defect::Panic, text), Some(id), line);
                }
            }
            if (*machine).report.is_some() {
                break;
            }
        }
        let report = (*machine).report.take();
        for memory in (*machine).memories.clone() {
            (*memory).settle();
        }
        let statistics = (*machine).statistics;
        report.map_or(Ok(statistics), Err)
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no message)")
}
