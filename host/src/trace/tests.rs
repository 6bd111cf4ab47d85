use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::ops::layernorm::{LayerNorm, LayerNormProblem};
use crate::ops::rmsnorm::{RmsNorm, RmsNormProblem};
use crate::simulator::tests::Script;
use crate::{DType, Device, Fallback};

/// Writes events down, a line each.
#[derive(Clone, Default)]
struct Lines {
    lines: Arc<Mutex<Vec<String>>>,
    most: Option<Level>,
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "warpforge" && self.most.is_none_or(|most| *metadata.level() <= most)
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.lines.lock().unwrap().push(line.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn heard(most: Option<Level>, work: impl FnOnce()) -> Vec<String> {
    let lines = Lines { most, ..Lines::default() };
    tracing::subscriber::with_default(lines.clone(), work);
    std::mem::take(&mut *lines.lines.lock().unwrap())
}

#[test]
fn plans_are_told_with_their_kernel() {
    let card = Device::simulated(Script::new((6, 1), Ok(()))).unwrap();
    let plan = |device: &Device| {
        RmsNorm::plan(device, RmsNormProblem::new(2, 4, DType::F32, 1e-6)).unwrap();
    };
    let lines = heard(None, || plan(&Device::cpu()));
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert!(line.starts_with("DEBUG message=planned op=\"rmsnorm\""), "{line}");
    assert!(line.contains("variant=\"cpu\"") && line.contains("why="), "{line}");
    let lines = heard(None, || plan(&card));
    assert!(lines[0].contains("variant=\"rmsnorm_f32"), "{lines:?}");
    assert!(lines[0].contains("device=\"Script (simulated"), "{lines:?}");
    assert!(heard(Some(Level::WARN), || plan(&card)).is_empty());
}

/// The simulated card has no kernels of this operator.
#[test]
fn fallbacks_are_warnings() {
    let card = Device::simulated(Script::new((6, 1), Ok(()))).unwrap().with_fallback(Fallback::Cpu);
    let lines = heard(None, || {
        LayerNorm::plan(&card, LayerNormProblem::new(2, 4, DType::F32, 1e-6)).unwrap();
    });
    let [warning, plan] = &lines[..] else { panic!("{lines:?}") };
    assert!(warning.starts_with("WARN message=layernorm falls back to "), "{warning}");
    assert!(plan.starts_with("DEBUG") && plan.contains("variant=\"cpu\""), "{plan}");
}
