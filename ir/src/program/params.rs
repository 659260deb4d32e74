//! What of parameters and optimizer states a program's slots and buckets hold.

use super::{Content, Program, Stage};
use crate::dim::IndexMap;
use serde::{Deserialize, Serialize};

/// Parameters that lie one after the other and are updated as one. What lies between them, and after the last, means nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Elements.
    pub size: u64,
    /// What its parameter is: weights, or a copy of them.
    pub holds: ParamRole,
    /// In ascending order.
    pub pieces: Vec<Piece>,
}

/// What the parameter of a slot or a bucket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ParamRole {
    /// The weights themselves; all states are the optimizer's.
    Weights,
    /// A copy for the model to compute with, in less precision or in another memory. The weights themselves are state 0; the optimizer's follow.
    Copies,
}

impl ParamRole {
    /// What its parameter is, or its state of this number.
    pub fn role(self, state: Option<u32>) -> Role {
        match (self, state) {
            (ParamRole::Weights, None) | (ParamRole::Copies, Some(0)) => Role::Weights,
            (ParamRole::Copies, None) => Role::Copy,
            (ParamRole::Weights, Some(k)) => Role::State(k),
            (ParamRole::Copies, Some(k)) => Role::State(crate::fault!("params.role.shifted", k, k - 1)),
        }
    }
}

/// A parameter of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Piece {
    /// Of [`Stage::params`].
    pub slot: u32,
    /// The element of the bucket that it begins at.
    pub at: u64,
    /// Local to global, per dim in storage order.
    pub index: Vec<IndexMap>,
}

impl Piece {
    /// Elements that a rank has of it.
    pub fn elements(&self) -> u64 {
        self.index.iter().map(IndexMap::len).product()
    }
}

/// What a part of a buffer is to a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The weights themselves.
    Weights,
    /// A copy of the weights, for the model to compute with.
    Copy,
    /// The optimizer's state of this number, from 0.
    State(u32),
}

/// A parameter, copy or state of which a buffer holds a part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParamShard<'a> {
    /// Of [`Stage::params`].
    pub slot: u32,
    /// What the buffer holds of the parameter.
    pub role: Role,
    /// From local to global index, per dim of the parameter in storage order.
    pub index: &'a [IndexMap],
    /// In a bucket: the element that it begins at, and the bucket's elements that the buffer holds.
    pub bucket: Option<(u64, &'a IndexMap)>,
}

impl Program {
    /// The bucket of a slot, if it is not a parameter's.
    pub fn bucket(&self, stage: &Stage, slot: u32) -> Option<&Bucket> {
        self.buckets.get((slot as usize).checked_sub(stage.params.len())?)
    }

    /// What a buffer holds of parameters and states, on a stage of this program; none of slots that there are not.
    pub fn parts<'a>(&'a self, stage: &Stage, content: &'a Content) -> Vec<ParamShard<'a>> {
        let (slot, state, index) = match content {
            Content::Param { slot, index } => (*slot, None, index),
            Content::State { slot, state, index } => (*slot, Some(*state), index),
            Content::Table { .. } | Content::Accumulator | Content::Activation => return vec![],
        };
        if (slot as usize) < stage.params.len() {
            let holds = if self.copied.contains(&slot) { ParamRole::Copies } else { ParamRole::Weights };
            return vec![ParamShard { slot, role: holds.role(state), index, bucket: None }];
        }
        let (Some(bucket), [window]) = (self.bucket(stage, slot), index.as_slice()) else { return vec![] };
        let role = bucket.holds.role(state);
        bucket.pieces.iter().map(|p| ParamShard { slot: p.slot, role, index: &p.index, bucket: Some((p.at, window)) }).collect()
    }
}
