//! Several devices that have a model together: the first one leads, and the others do with their parts what it does.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, Sender, channel};

use warpforge::DType;
use warpforge::group::Communicator;
use warpforge::models::{Model, PatchGrid, Session, SessionOptions, Shard, Visual};

use crate::options::Options;
use crate::output::Failure;

/// What the others are told.
#[derive(Clone)]
enum Call {
    Truncate(usize),
    Prefill(Vec<u32>, Vec<(PatchGrid, Vec<f32>)>),
    Decode(u32),
}

/// The others, who do what they are told; none on a single device.
#[derive(Default)]
pub struct Followers(Vec<Sender<Call>>);

/// What one of them is told.
pub struct Orders(Receiver<Call>);

impl Followers {
    /// So many, and the orders of each.
    pub fn new(count: usize) -> (Self, Vec<Orders>) {
        let (calls, orders) =
            (0..count).map(|_| channel()).map(|(call, order)| (call, Orders(order))).unzip();
        (Followers(calls), orders)
    }

    fn tell(&self, call: &Call) {
        for follower in &self.0 {
            // One that has gone has said why: what is waited for from it fails.
            let _ = follower.send(call.clone());
        }
    }

    /// As [`Session::truncate`] of the first sequence.
    pub fn truncate(&self, len: usize) {
        self.tell(&Call::Truncate(len));
    }

    /// As [`Session::prefill_visual`].
    pub fn prefill(&self, ids: &[u32], visuals: &[Visual<'_>]) {
        if !self.0.is_empty() {
            let visuals = visuals.iter().map(|visual| (visual.grid, visual.patches.to_vec())).collect();
            self.tell(&Call::Prefill(ids.to_vec(), visuals));
        }
    }

    /// As [`Session::decode`].
    pub fn decode(&self, id: u32) {
        self.tell(&Call::Decode(id));
    }
}

/// Loads a rank's part, and does what it is told for as long as there is somebody who tells.
pub fn follow(
    rank: &Communicator,
    options: &Options,
    (dtype, session): (DType, SessionOptions),
    orders: &Orders,
) -> Result<(), Failure> {
    let checkpoint = options.checkpoint()?;
    let mut go_on = |_| ControlFlow::Continue(());
    let model = Model::of_rank(
        Shard::from(rank).with_experts(options.experts),
        &checkpoint,
        dtype,
        options.quant,
        &mut go_on,
    )?;
    let mut session = model.session(session)?;
    while let Ok(call) = orders.0.recv() {
        obey(&mut session, &call)?;
    }
    Ok(())
}

fn obey(session: &mut Session, call: &Call) -> Result<(), Failure> {
    match call {
        // Where it cannot be, the leader is told so too, and goes on in another way.
        Call::Truncate(len) => drop(session.truncate(0, *len)),
        Call::Prefill(ids, visuals) => {
            let visuals: Vec<_> =
                visuals.iter().map(|(grid, patches)| Visual { grid: *grid, patches }).collect();
            session.prefill_visual(0, ids, &visuals)?;
        }
        Call::Decode(id) => drop(session.decode(&[*id])?),
    }
    Ok(())
}
